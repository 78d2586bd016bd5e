"""Rows without the stop string that ended them, for every kind of layer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lamina
from lamina.errors import InputError
from lamina.generation import Result
from lamina.generation.stopping import Stopping
from lamina.model import Model
from tests.generation.rows import FAMILIES, model_of
from tests.generation.text import reader, tokenizer, unreadable

PROMPTS = [[5, 9, 12, 3, 44, 8, 21], [7], [30, 31, 32]]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    found = model_of(request.param)
    found.tokenizer = tokenizer()
    yield found
    found.tokenizer = None


def letters(model: Model) -> list[int]:
    """Ids that must not come, so that all text is letters."""
    return [i for i in unreadable() if i < model.vocab]


def made(model: Model, prompts: Any = PROMPTS, **given: Any) -> Result:
    settings = dict(eos_token_id=(), suppress_tokens=letters(model), repetition_penalty=1.6)
    return model.generate(prompts, 12, **settings, **given)


@pytest.mark.parametrize("slack", [0, 4])
def test_a_trimmed_row_ends_as_the_text_does_and_goes_on_as_from_scratch(model: Model, slack: int) -> None:
    text = made(model).text[0]
    result = made(model, stop_strings=text[4:7], cache=model.new_cache(3, slack=slack))
    assert result.reasons[0] == "stop" and result.text[0] == text[: text.index(text[4:7])]
    before, whole = result.cache.tokens, result.cache.tokens[0]
    cache = result.trimmed()
    assert result.cache.tokens == before  # a copy
    kept = cache.tokens[0][len(PROMPTS[0]) :]
    assert tokenizer().decode(kept) == result.text[0] and len(whole) > len(cache.tokens[0])
    for row, reason in enumerate(result.reasons):
        assert reason == "stop" or cache.tokens[row] == before[row]
    rest = model.generate([[1, 2], [3], [4]], 4, cache=cache, eos_token_id=(), whole=False)
    rows = [row + more for row, more in zip(result.trimmed().tokens, [[1, 2], [3], [4]], strict=True)]
    assert rest.tokens == model.generate(rows, 4, eos_token_id=()).tokens
    again = model.generate(None, 4, cache=result.trimmed(), eos_token_id=())  # the logits after the text are known
    assert again.tokens == model.generate(result.trimmed().tokens, 4, eos_token_id=()).tokens


@functools.cache
def spanning() -> tuple[list[int], str]:
    """Ids whose second token holds the end of one word and the beginning of another."""
    ids = tokenizer().encode("a thing")
    return ids, tokenizer().decode(ids[1:2])


def test_a_token_that_spans_the_boundary_goes_whole() -> None:
    ids, second = spanning()
    assert len(second) > 1
    for cut in range(1, len(second)):  # the stop string begins inside the second token
        stopping = Stopping([99], stop_strings=[second[cut:]], tokenizer=tokenizer())
        for token in ids:
            if stopping.put(0, token) is not None:
                break
        assert stopping.stop_chars == [1 + cut] and stopping.stop_tokens == [1]
    stopping = Stopping([99], stop_strings=[second], tokenizer=tokenizer())
    assert [stopping.put(0, token) for token in ids[:2]] == [None, "stop"] and stopping.stop_tokens == [1]


def test_the_first_bytes_of_a_stop_strings_character_go_with_it() -> None:
    for text, string, kept in (
        ("ab😀", "😀", "ab"),
        ("😀x", "😀", ""),
        ("é日", "日", "é"),
        ("<|im_end|>日", "日", None),
    ):
        ids = tokenizer().encode(text)
        stopping = Stopping([99], stop_strings=[string], tokenizer=tokenizer())
        reason = None
        while reason is None:
            reason = stopping.put(0, ids[len(stopping.rows[0].tokens)])
        before = stopping.stop_tokens[0]
        assert before is not None
        assert tokenizer().decode(ids[:before], skip_special=False) == ("<|im_end|>" if kept is None else kept)


def test_rows_that_end_otherwise_are_not_trimmed() -> None:
    model = reader()
    result = model.generate(PROMPTS, 4, eos_token_id=(), stop=lambda row, tokens, text: len(tokens) == 2)
    assert result.reasons == ["stop"] * 3 and result.before == [None] * 3
    assert result.trimmed().tokens == result.cache.tokens


def test_beams_a_pool_and_a_row_that_is_all_stop_string_are_trimmed() -> None:
    model = reader()
    settings = dict(eos_token_id=(), suppress_tokens=unreadable(), repetition_penalty=1.6)
    first = model.generate(PROMPTS, 1, **settings).text[0]
    pool = lamina.Pool(model, page=4)
    for given in (dict(), dict(num_beams=2), dict(cache=model.new_cache(3, pool=pool))):
        result = model.generate(PROMPTS, 6, stop_strings=first, **settings, **given)
        for row, (prompt, text) in enumerate(zip(PROMPTS, result.text, strict=True)):
            held = result.trimmed().tokens[row]
            assert held[: len(prompt)] == prompt
            assert result.reasons[row] != "stop" or text.startswith(tokenizer().decode(held[len(prompt) :]))
    assert result.text[0] == "" and result.trimmed().tokens[0] == PROMPTS[0]
    pool.check()


def test_what_cannot_be_trimmed_is_explained() -> None:
    model = model_of("mamba")
    model.tokenizer = tokenizer()
    try:
        embeds = [model.embed(torch.tensor(row)) for row in PROMPTS]
        text = made(model, None, inputs_embeds=embeds).text[0]
        for slack in (0, 6):
            cache = model.new_cache(3, slack=slack)
            result = made(model, None, inputs_embeds=embeds, stop_strings=text[1:3], cache=cache)
            assert result.reasons[0] == "stop"
            if slack:
                assert result.trimmed().lengths[0] < result.cache.lengths[0]
            else:
                with pytest.raises(InputError, match=r"since tokens were given as embeddings: .* slack=…\), with a s"):
                    result.trimmed()
        uncached = model.generate(PROMPTS, 3, use_cache=False)
        with pytest.raises(InputError, match="use_cache=False keeps nothing"):
            uncached.trimmed()
        result = made(model)
        model.generate([[1], [2], [3]], 1, cache=result.cache)
        with pytest.raises(InputError, match="row 0 of the cache was changed since"):
            result.trimmed()
    finally:
        model.tokenizer = None
