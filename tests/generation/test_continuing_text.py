"""Text, ids and chats for a row of a cache: they continue it, or are the whole sequence; no history is lost."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from lamina.cache import Cache
from lamina.checkpoint import Tokenizer
from lamina.errors import InputError
from lamina.generation import Result
from lamina.generation.reuse import whole_rows
from lamina.generation.strategies.healing import heal
from lamina.model import Model
from tests.generation.text import reader, tokenizer

BOS, EOS = 1, 2
FIRST = "the theory of the thing."
MESSAGES = [{"role": "user", "content": "the thing"}, {"role": "assistant", "content": "they think"}]


@functools.cache
def surrounding() -> Tokenizer:
    """The tokenizer with a token that it adds in front, and one behind."""
    backend = Backend.from_str(tokenizer().backend.to_str())
    around = "<|im_start|> $A <|im_end|>"
    backend.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[("<|im_start|>", BOS), ("<|im_end|>", EOS)]
    )
    return Tokenizer(backend, eos_ids=(EOS,), bos_id=BOS, templates=tokenizer().templates)


def with_bos() -> Tokenizer:
    return Tokenizer(tokenizer().backend, eos_ids=(EOS,), bos_id=BOS, add_bos=True, templates=tokenizer().templates)


TOKENIZERS = {"without": tokenizer, "bos": with_bos, "bos and eos": surrounding}


@pytest.fixture(params=TOKENIZERS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    """A model whose tokenizer adds special tokens, or none."""
    found = reader()
    found.tokenizer = TOKENIZERS[request.param]()
    yield found
    found.tokenizer = tokenizer()


@pytest.fixture
def plain() -> Model:
    return reader()


def ids(model: Model, text: str, special: bool) -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.encode(text, special)


def holding(model: Model, *rows: list[int]) -> Cache:
    """A cache that holds these rows; some may be empty."""
    cache = model.new_cache(len(rows))
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
    if padded.numel():
        model(padded, cache=cache, counts=[len(row) for row in rows])
    return cache


def go_on(model: Model, prompts: Any, cache: Cache, **given: Any) -> Result:
    return model.generate(prompts, 3, cache=cache, eos_token_id=(), **given)


def check(model: Model, result: Result, rows: list[list[int]], reused: list[int]) -> None:
    """The result is that of these whole rows from scratch."""
    assert result.tokens == model.generate(rows, 3, eos_token_id=()).tokens
    assert result.cache.tokens == [row + new for row, new in zip(rows, result.tokens, strict=True)]
    assert result.reused == reused


# -- text ----------------------------------------------------------------------------------------------------------


def test_text_continues_a_row_and_gets_no_special_tokens(model: Model) -> None:
    row = ids(model, FIRST, True)
    for text in (" they", FIRST, FIRST[:7], FIRST + " they", "<|im_start|>x", "the thing"):
        for whole in (None, False):
            result = go_on(model, text, holding(model, row), whole=whole)
            check(model, result, [row + ids(model, text, False)], [0])


def test_text_for_an_empty_row_gets_the_usual_special_tokens(model: Model) -> None:
    for whole in (None, False, True):
        result = go_on(model, FIRST, model.new_cache(), whole=whole)
        check(model, result, [ids(model, FIRST, True)], [0])
    assert result.cache.tokens[0][: len(ids(model, FIRST, True))] == model.generate(FIRST).prompts[0]


def test_text_that_is_said_to_be_whole_is_encoded_as_a_whole(model: Model) -> None:
    row = ids(model, "the theory of", True)
    cache = holding(model, row)
    wanted = ids(model, "the theory is", True)
    shared = next(n for n, (a, b) in enumerate(zip(row, wanted, strict=False)) if a != b)
    check(model, go_on(model, "the theory is", cache, whole=True), [wanted], [shared])


def test_a_text_that_begins_like_the_row_is_not_taken_for_it(model: Model) -> None:
    result = model.generate(FIRST, 3, eos_token_id=())
    before = result.cache.tokens[0]
    after = go_on(model, FIRST[:10], result.cache).cache.tokens[0]
    assert after[: len(before)] == before and len(after) > len(before) + 3


def test_ragged_rows_get_special_tokens_each_for_itself(model: Model) -> None:
    rows = [[], ids(model, FIRST, True), [7]]
    texts = ["the", " they", " thing"]
    expected = [row + ids(model, text, not row) for row, text in zip(rows, texts, strict=True)]
    check(model, go_on(model, texts, holding(model, *rows)), expected, [0, 0, 0])


def test_an_empty_text_goes_on_where_the_row_is_and_begins_an_empty_one(model: Model) -> None:
    row = ids(model, FIRST, True)
    check(model, go_on(model, "", holding(model, row)), [row], [0])
    if begun := ids(model, "", True):
        check(model, go_on(model, "", model.new_cache()), [begun], [0])
    else:
        with pytest.raises(InputError, match="prompt 0 is empty, and so is its row"):
            go_on(model, "", model.new_cache())


def test_one_row_serves_several_texts_and_stays_as_it_is(model: Model) -> None:
    row = ids(model, FIRST, True)
    cache, texts = holding(model, row), [" they", FIRST, "x"]
    check(model, go_on(model, texts, cache), [row + ids(model, text, False) for text in texts], [0, 0, 0])
    assert cache.tokens == [row]


def test_a_wrong_number_of_texts_is_told(model: Model) -> None:
    with pytest.raises(InputError, match="3 prompts were given, the cache has 2 rows"):
        go_on(model, ["a", "b", "c"], holding(model, [5], [6]))


# -- ids and chats -------------------------------------------------------------------------------------------------

ROW = [5, 6, 7]
CASES = [  # prompt, whole -> what the row holds then, and how much of the prompt it held before
    ([5, 6, 7, 8], None, [5, 6, 7, 8], 3),
    ([5, 6, 7], None, [5, 6, 7, 5, 6, 7], 0),
    ([5, 6], None, [5, 6, 7, 5, 6], 0),
    ([5, 6, 9, 9, 9], None, [5, 6, 7, 5, 6, 9, 9, 9], 0),
    ([8], None, [5, 6, 7, 8], 0),
    ([5, 6, 7, 8], False, [5, 6, 7, 5, 6, 7, 8], 0),
    ([5, 6, 7], True, [5, 6, 7], 3),
    ([5, 6, 9], True, [5, 6, 9], 2),
    ([9], True, [9], 0),
]


@pytest.mark.parametrize(("prompt", "whole", "row", "reused"), CASES)
def test_ids_are_the_whole_sequence_only_where_the_row_is_a_strict_prefix_of_them(
    plain: Model, prompt: list[int], whole: bool | None, row: list[int], reused: int
) -> None:
    forms: list[Any] = [[prompt], torch.tensor([prompt])]
    for form in forms:
        check(plain, go_on(plain, form, holding(plain, ROW), whole=whole), [row], [reused])


def test_rows_with_different_cases_are_decided_each_for_itself(plain: Model) -> None:
    prompts = [prompt for prompt, whole, _, _ in CASES if whole is None]
    rows = [row for _, whole, row, _ in CASES if whole is None]
    reused = [n for _, whole, _, n in CASES if whole is None]
    assert whole_rows([ROW] * 5, prompts, None) == [n > 0 for n in reused]
    check(plain, go_on(plain, prompts, holding(plain, *[ROW] * 5)), rows, reused)
    check(plain, go_on(plain, prompts, holding(plain, ROW)), rows, reused)  # one row for all
    check(plain, go_on(plain, [*prompts, [8]], holding(plain, *[ROW] * 5, [])), [*rows, [8]], [*reused, 0])


def test_a_chat_is_whole_where_the_row_is_a_strict_prefix_and_comes_next_elsewhere(model: Model) -> None:
    assert model.tokenizer is not None
    begun = ids(model, model.tokenizer.chat(MESSAGES[:1], add_generation_prompt=False), False)
    more = [*MESSAGES, {"role": "user", "content": "a theory"}]
    whole = ids(model, model.tokenizer.chat(more), False)
    assert whole[: len(begun)] == begun and BOS not in ids(model, "the thing", False)
    check(model, go_on(model, more, holding(model, begun)), [whole], [len(begun)])
    other = ids(model, FIRST, True)
    check(model, go_on(model, more, holding(model, other)), [other + whole], [0])
    check(model, go_on(model, more, holding(model, other), whole=True), [whole], [int(other[0] == whole[0])])
    check(model, go_on(model, [more, more], holding(model, begun, [])), [whole, whole], [len(begun), 0])


# -- healing -------------------------------------------------------------------------------------------------------


def healed(model: Model, prompts: Any, cache: Cache | None, **given: Any) -> Result:
    return model.generate(prompts, 3, cache=cache, eos_token_id=(), token_healing=True, **given)


def test_healing_the_text_that_continues_a_row_gives_what_healing_the_whole_gives(model: Model) -> None:
    row = ids(model, FIRST, True)
    for text in (" think th", " th"):
        new = ids(model, text, False)
        assert len(heal(tokenizer(), [*row, *new]).allowed) > 1
        expected = healed(model, [row + new], None)
        result = healed(model, text, holding(model, row))
        assert result.tokens == expected.tokens
        assert result.cache.tokens == expected.cache.tokens and result.prompts == [new[:-1]]


def test_what_is_whole_is_decided_by_the_prompt_before_it_is_healed(plain: Model) -> None:
    row = ids(plain, "the thing is", False)
    last = ids(plain, " th", False)
    assert len(last) == 1 and len(heal(tokenizer(), [*row, *last]).allowed) > 1
    expected = healed(plain, [row + last], None)
    result = healed(plain, [row + last], holding(plain, row))  # healed, the prompt is no longer than the row
    assert result.cache.tokens == expected.cache.tokens and result.reused == [len(row)]


def test_a_first_token_of_an_empty_row_is_not_healed(plain: Model) -> None:
    last = ids(plain, " th", False)
    result = healed(plain, [last], plain.new_cache())
    assert result.cache.tokens[0][:1] == last and result.prompts == [last]
