"""Whatever fails, a given cache holds whole tokens and says which: it can be continued as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from lamina.cache import Cache
from lamina.errors import CapacityError, InputError
from lamina.generation import Event, History
from lamina.model import Model
from tests.generation.rows import MORE, NEW, PROMPTS, added, every_family, held, made, model_of, scratch


class Stop(Exception):
    """Raised by what the caller passes."""


def goes_on(model: Model, cache: Cache) -> None:
    """The cache is what it says it is: poisoned where nothing may be read, it gives the tokens of its rows."""
    rows = cache.tokens
    assert cache.lengths.tolist() == [len(row) for row in rows]
    result = made(model, [[3]] * len(rows), new=2, cache=cache.poison(), whole=False)
    assert result.tokens == scratch(model, [[*row, 3] for row in rows], new=2)


WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(prompts=[[1], [67], [2]]), "id 67 at row 1"),
    (dict(prompts=[[1], [2]]), "2 prompts were given, the cache has 3 rows"),
    (dict(row_ids=[1]), "row_ids has 1 ids for 3 sequences"),
    (dict(sequence_bias={(99,): 1.0}), "sequence_bias has the id 99"),
    (dict(bad_words_ids=[[99]]), "bad_words_ids has the id 99"),
    (dict(temperature=0.5, do_sample=False), "temperature=0.5 and do_sample=False"),
    (dict(max_length=5, max_new_tokens=None), "max_length=5 leaves no room after a prompt of"),
    (dict(min_length=90), "must get"),
    (dict(guidance_scale=2.0, negative_prompt=[[1], [2]]), "2 negative prompts were given for 3 prompts"),
    (dict(guidance_scale=2.0, prompt_lookup_num_tokens=2), "guidance works token by token"),
    (dict(guidance_scale=2.0, negative_prompt=[[99]]), "id 99 at row 0"),
    (dict(assistant_early_exit=99), "assistant_early_exit=99"),
    (dict(use_cache=False), "use_cache=False and a cache were given"),
    (dict(stop_strings="x"), "no tokenizer"),
    (dict(max_tokens=5), "there is no parameter 'max_tokens'"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG, ids=[text for _, text in WRONG])
def test_what_is_refused_leaves_the_cache_as_it_was(wrong: dict[str, Any], text: str) -> None:
    model, cache = model_of("gemma2"), held("gemma2")
    before = cache.tokens
    with pytest.raises(InputError, match=text):
        model.generate(**dict(prompts=MORE, max_new_tokens=NEW, cache=cache, whole=False) | wrong)
    assert cache.tokens == before
    goes_on(model, cache)


@every_family
def test_a_cache_that_is_too_small_is_left_as_it_was(family: str) -> None:
    model = model_of(family)
    cache = made(model, PROMPTS, cache=model.new_cache(3, capacity=18, slack=2)).cache
    before = cache.tokens
    for prompts in (MORE, [before[0][:4] + [9] * 12, *MORE[1:]]):
        if cache.limit is None:  # nothing but states, which have no end
            continue
        with pytest.raises(CapacityError, match="the capacity is 18"):
            made(model, prompts, cache=cache)
        assert cache.tokens == before
    with pytest.raises(InputError, match="id 67"):
        made(model, [[67], [1], [2]], cache=cache)
    assert made(model, [[3], [4], [5]], new=1, cache=cache, whole=False).tokens == scratch(
        model, added(before, [[3], [4], [5]]), new=1
    )


def failing(after: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A listener and a processor that fail when they have been called so often."""
    calls = [0]

    def count() -> None:
        calls[0] += 1
        if calls[0] > after:
            raise Stop

    def listener(event: Event) -> None:
        count()

    def processor(scores: Tensor, history: History) -> Tensor:
        count()
        return scores

    return listener, processor


@every_family
@pytest.mark.parametrize("draft", [{}, {"prompt_lookup_num_tokens": 3}], ids=["plain", "drafted"])
def test_a_failing_listener_or_processor_leaves_whole_tokens(family: str, draft: dict[str, int]) -> None:
    model = model_of(family)
    before = held(family).tokens
    expected = scratch(model, added(before, MORE))
    for after in (0, 5):
        listener, processor = failing(after)
        for given in (dict(stream=listener), dict(logits_processor=[processor])):
            cache = held(family)
            with pytest.raises(Stop):
                made(model, MORE, cache=cache, whole=False, **given, **draft)
            for row, now in enumerate(cache.tokens):
                start = len(before[row]) + len(MORE[row])
                assert now[:start] == before[row] + MORE[row]
                assert now[start:] == expected[row][: len(now) - start]
            goes_on(model, cache)


def test_a_pass_that_fails_in_the_middle_of_the_prompt_leaves_the_pieces_before(monkeypatch: Any) -> None:
    model, cache = model_of("qwen3_next"), held("qwen3_next")
    before, passes = cache.tokens, [0]
    unembed = type(model).unembed

    def failing_unembed(self: Model, x: Tensor) -> Tensor:
        passes[0] += 1
        if passes[0] == 2:
            raise Stop
        return unembed(self, x)

    monkeypatch.setattr(type(model), "unembed", failing_unembed)
    with pytest.raises(Stop):
        made(model, MORE, cache=cache, whole=False, prefill_chunk=2)
    monkeypatch.undo()
    assert cache.tokens == added(before, [row[:2] for row in MORE])
    goes_on(model, cache)


@every_family
def test_a_cancelled_stream_leaves_whole_tokens(family: str) -> None:
    model, cache = model_of(family), held(family)
    before = added(cache.tokens, MORE)
    stream = model.stream(MORE, 30, cache=cache, whole=False, eos_token_id=())
    events = [event for event, _ in zip(stream, range(4), strict=False)]
    stream.cancel()
    assert stream.over and [event.row for event in events] == [0, 1, 2, 0]
    expected = scratch(model, before, new=30)
    for row, now in enumerate(cache.tokens):
        assert now[: len(before[row])] == before[row]
        new = now[len(before[row]) :]
        assert 1 <= len(new) < 30 and new == expected[row][: len(new)]
    goes_on(model, cache)
