"""Running out of room in the middle: the error carries what was made, and the cache goes on from there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import lamina
from lamina.cache import Cache
from lamina.errors import CapacityError, PagesError
from lamina.generation import Event, Result, call
from lamina.generation.chat import Chat
from lamina.model import Model
from tests.generation.rows import PROMPTS, added, held, made, model_of
from tests.generation.text import reader

NEW = 30
PAGES = 11  # of 4 tokens: the prompts take 5, and rows of 19, 9 and 11 tokens take all


def short(model: Model, pages: int = PAGES) -> tuple[lamina.Pool, Cache]:
    """A pool that is too small for all new tokens, and a cache in it."""
    pool = lamina.Pool(model, tokens=4 * pages, page=4)
    return pool, model.new_cache(3, pool=pool)


def result_of(error: pytest.ExceptionInfo[CapacityError]) -> Result:
    assert error.value.result is not None
    return error.value.result


def goes_on(model: Model, result: Result, expected: list[list[int]]) -> None:
    """What was made is the beginning of what is expected, and in a larger pool the cache goes on to its end."""
    assert result.cache.tokens == added(result.prompts, result.tokens)
    for new, whole in zip(result.tokens, expected, strict=True):
        assert new == whole[: len(new)] and len(new) < len(whole)
    elsewhere = Cache.join([model.new_cache(pool=lamina.Pool(model, page=4)), result.cache]).select([1, 2, 3])
    rest = made(model, None, 4, cache=elsewhere)
    assert rest.tokens == [row[len(new) :][:4] for row, new in zip(expected, result.tokens, strict=True)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
@pytest.mark.parametrize(
    "settings",
    [{}, dict(do_sample=True, seed=5), dict(prompt_lookup_num_tokens=3), dict(dola_layers="low")],
    ids=["plain", "drawn", "drafted", "dola"],
)
def test_a_pool_that_runs_dry_gives_what_was_made(family: str, settings: dict[str, Any]) -> None:
    model = model_of(family)
    expected = made(model, PROMPTS, NEW, **settings).tokens
    pool, cache = short(model)
    with pytest.raises(PagesError) as error:
        made(model, PROMPTS, NEW, cache=cache, **settings)
    result = result_of(error)
    assert result.cache is cache and result.reasons == ["pages"] * 3 and result.timing.new_tokens > 0
    assert [new == row[: len(new)] for new, row in zip(result.tokens, expected, strict=True)] == [True] * 3
    assert result.cache.tokens == added(PROMPTS, result.tokens)
    count = sum(map(len, result.tokens))
    text = str(error.value)
    assert text.startswith(f"There was no room after {count} new tokens: ") and "Nothing was changed" not in text
    assert f"The rows hold {cache.lengths.tolist()} tokens now: error.result has the new ones" in text
    assert "To go on: release a cache" in text
    pool.check()
    if not settings:
        goes_on(model, result, expected)


def test_once_pages_are_free_the_rows_go_on_in_place() -> None:
    model = model_of("llama")
    expected = made(model, PROMPTS, NEW).tokens
    pool = lamina.Pool(model, tokens=4 * 40, page=4)
    other = model.new_cache(pool=pool)
    model(torch.ones(1, 4 * 29, dtype=torch.int64), cache=other)
    with pytest.raises(PagesError) as error:
        made(model, PROMPTS, NEW, cache=model.new_cache(3, pool=pool))
    first = result_of(error)
    other.release()
    rest = made(model, None, NEW - len(first.tokens[0]), cache=first.cache)
    assert added(first.tokens, rest.tokens)[0] == expected[0]


def test_rows_that_had_ended_keep_their_reasons() -> None:
    model = model_of("llama")
    cache = short(model)[1]
    ended = made(model, PROMPTS, NEW).tokens[1][2]
    with pytest.raises(PagesError) as error:
        made(model, PROMPTS, NEW, cache=cache, stop=lambda row, tokens, text: row == 1 and tokens[-1] == ended)
    result = result_of(error)
    assert result.reasons == ["pages", "stop", "pages"] and result.tokens[1][-1] == ended


def test_a_row_does_not_end_with_a_token_that_found_no_room() -> None:
    model = model_of("llama")
    with pytest.raises(PagesError) as error:
        made(model, PROMPTS, NEW, cache=short(model)[1])
    first = result_of(error).tokens
    with pytest.raises(PagesError) as error:
        made(model, PROMPTS, NEW, cache=short(model)[1], stop=lambda row, tokens, text: len(tokens) > len(first[row]))
    assert result_of(error).tokens == first and result_of(error).reasons == ["pages"] * 3


def test_scores_are_kept_of_the_tokens_that_were_made() -> None:
    model = model_of("llama")
    for settings in ({}, {"num_beams": 2}):
        with pytest.raises(PagesError) as error:
            made(model, PROMPTS, NEW, cache=short(model)[1], output_scores=True, **settings)
        result = result_of(error)
        assert [len(row) for row in result.scores] == [len(row) for row in result.tokens]


@pytest.mark.parametrize("settings", [dict(num_beams=3, num_return_sequences=2), dict(penalty_alpha=0.6, top_k=3)])
def test_searches_give_the_best_that_they_had(settings: dict[str, Any]) -> None:
    model = model_of("llama")
    pool, cache = short(model, 28)
    told: list[Event] = []
    with pytest.raises(PagesError) as error:
        made(model, PROMPTS, NEW, cache=cache, stream=told.append, **settings)
    result = result_of(error)
    each = settings.get("num_return_sequences", 1)
    assert result.reasons == ["pages"] * 3 * each and min(map(len, result.tokens)) > 0
    assert result.cache.tokens == added(result.prompts, result.tokens)
    assert [[event.token for event in told if event.row == row] for row in range(3 * each)] == result.tokens
    if "num_beams" not in settings:
        assert result.tokens == made(model, PROMPTS, len(result.tokens[0]), **settings).tokens
    pool.check()
    del error, cache, told, result
    gc.collect()
    assert pool.used == 0


def test_a_search_whose_best_find_no_room_leaves_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    cache = short(model)[1]

    def full(*given: Any) -> None:
        raise PagesError("1 more page is needed. Nothing was changed: release a cache.")

    monkeypatch.setattr("lamina.generation.strategies.beams.feed_rows", full)
    with pytest.raises(PagesError) as error:
        made(model, PROMPTS, 2, cache=cache, num_beams=2, num_return_sequences=2)
    result = result_of(error)
    assert result.tokens == [[]] * 6 and result.cache.tokens == [row for row in PROMPTS for _ in range(2)]


def test_a_stream_gives_its_events_and_then_the_error_with_the_result() -> None:
    model = model_of("llama")
    stream = model.stream(PROMPTS, NEW, cache=short(model)[1], eos_token_id=())
    events: list[Event] = []
    with pytest.raises(PagesError) as error:
        events.extend(stream)
    result = result_of(error)
    shown = [[event.token for event in events if event.row == row] for row in range(3)]
    assert [row[: len(new)] for row, new in zip(shown, result.tokens, strict=True)] == result.tokens
    assert all(len(row) <= len(new) + 1 for row, new in zip(shown, result.tokens, strict=True))  # chosen, not fed
    with pytest.raises(PagesError):
        _ = stream.result


def test_prompts_that_find_no_room_are_told_with_what_the_rows_hold() -> None:
    model = model_of("llama")
    _, cache = short(model)
    long = [[3] * 30, [4] * 30, [5] * 30]
    with pytest.raises(PagesError) as error:
        made(model, long, cache=cache)
    result = result_of(error)
    assert (result.tokens, result.reasons, cache.tokens) == ([[]] * 3, ["pages"] * 3, [[]] * 3)
    with pytest.raises(PagesError, match=r"no room for the prompts: .* hold \[12, 12, 12\] tokens now: error") as error:
        made(model, long, cache=cache, prefill_chunk=6)
    assert result_of(error).cache.tokens == [row[:12] for row in long]
    assert made(model, PROMPTS, 2, cache=cache.reset()).tokens == made(model, PROMPTS, 2).tokens


def test_a_chat_whose_pool_runs_dry_stays_as_it_was_and_goes_on() -> None:
    model = reader()
    pool = lamina.Pool(model, tokens=48, page=4)
    chat = Chat(model, cache=model.new_cache(pool=pool), max_new_tokens=100, eos_token_id=())
    for ask in (chat.send, lambda text: list(chat.stream(text))):
        with pytest.raises(PagesError) as error:
            ask("the thing")
        assert chat.messages == [] and len(result_of(error).tokens[0]) > 0
    other = Chat(model, cache=chat.cache, max_new_tokens=3, eos_token_id=())
    assert other.send("the thing").tokens == Chat(model, max_new_tokens=3, eos_token_id=()).send("the thing").tokens


def test_a_capacity_that_is_reached_in_the_middle_gives_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before the first token; here somebody was wrong about that."""
    model = model_of("llama")
    monkeypatch.setattr(model, "uncaptured", "a program asks for the room of all its steps at once")
    monkeypatch.setattr(call, "make_room", lambda *given: None)
    cache = model.new_cache(3, capacity=15)
    with pytest.raises(CapacityError, match=r"There was no room after 12 new tokens: row 0 holds 15 tokens") as error:
        made(model, PROMPTS, NEW, cache=cache)
    result = result_of(error)
    assert result.reasons == ["capacity"] * 3 and result.tokens == made(model, PROMPTS, 4).tokens
    assert cache.tokens == added(PROMPTS, result.tokens)


def test_what_is_refused_before_the_first_token_has_no_result() -> None:
    model = model_of("llama")
    with pytest.raises(CapacityError) as error:
        made(model, PROMPTS, NEW, cache=model.new_cache(3, capacity=15))
    assert error.value.result is None
    cache = held("llama")
    assert made(model, None, 2, cache=cache).cache is cache
