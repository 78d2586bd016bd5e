"""However a cache is continued, the tokens are those of one run from scratch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.errors import InputError
from lamina.generation import Result
from lamina.model import Model
from tests.families.test_t5 import pair as t5_pair
from tests.generation.rows import FAMILIES, MORE, NEW, PROMPTS, added, every_family, held, made, model_of, scratch


def check(model: Model, result: Result, rows: list[list[int]]) -> None:
    """The tokens are those of these whole rows from scratch, and the cache holds both."""
    assert result.tokens == scratch(model, rows)
    assert result.cache.tokens == added(rows, result.tokens)


# -- what is given -----------------------------------------------------------------------------------------------------


@every_family
def test_rows_go_on_with_only_their_new_tokens(family: str) -> None:
    model, cache = model_of(family), held(family)
    rows = added(cache.tokens, MORE)
    for whole in (False, None):
        result = made(model, MORE, cache=cache.fork(), whole=whole)
        check(model, result, rows)
        assert result.reused == [0, 0, 0] and result.timing.prompt_tokens == sum(map(len, MORE))


@every_family
def test_of_whole_sequences_only_what_is_new_is_fed(family: str) -> None:
    model, cache = model_of(family), held(family)
    before, rows = cache.tokens, added(cache.tokens, MORE)
    for whole in (True, None):
        result = made(model, rows, cache=cache.fork(), whole=whole)
        check(model, result, rows)
        assert result.reused == [len(row) for row in before]
        assert result.timing.prompt_tokens == sum(map(len, MORE))


@every_family
def test_a_cache_that_covers_the_prompts_feeds_nothing(family: str) -> None:
    model, cache = model_of(family), held(family)
    rows = cache.tokens
    for prompts in (rows, [[], rows[1], []], None):
        result = made(model, prompts, cache=cache.fork(), whole=True)
        check(model, result, rows)
        assert result.timing.prompt_tokens == 0
    check(model, made(model, None, cache=cache.fork()), rows)
    check(model, made(model, rows, cache=cache.fork()), added(rows, rows))  # not a strict prefix: it is what comes next


@every_family
@pytest.mark.parametrize("slack", [0, 4])
def test_prompts_that_end_inside_the_cache_take_rows_back_as_far_as_they_go(family: str, slack: int) -> None:
    model, cache = model_of(family), held(family, slack)
    rows = [row[: len(row) - back] for row, back in zip(cache.tokens, (2, 0, 4), strict=True)]
    possible = cache.rewindable.tolist()
    result = made(model, rows, cache=cache, whole=True)
    check(model, result, rows)
    # The last token of a shorter prompt is fed again for its logits, so the row goes back one further.
    assert result.reused == [
        n if back == 0 else n - 1 if back < most else 0
        for n, back, most in zip(map(len, rows), (2, 0, 4), possible, strict=True)
    ]
    assert result.cache is cache


@every_family
@pytest.mark.parametrize("slack", [0, 3])
def test_only_a_row_that_cannot_go_back_far_enough_starts_anew(family: str, slack: int) -> None:
    model, cache = model_of(family), held(family, slack)
    before, possible = cache.tokens, cache.rewindable.tolist()
    rows = added(before, MORE)
    rows[0] = [*before[0][:2], 60, 61]  # leaves the row 14 tokens before its end
    rows[2] = [*before[2][:-2], 62]
    result = made(model, rows, cache=cache, whole=True)
    check(model, result, rows)
    back, kept = [len(before[0]) - 2, 0, 2], [2, len(before[1]), len(before[2]) - 2]
    assert result.reused == [n if b <= most else 0 for n, b, most in zip(kept, back, possible, strict=True)]


def test_rows_of_rings_and_recurrent_layers_started_anew_where_rows_of_full_attention_went_back() -> None:
    reused = {}
    for family in FAMILIES:
        cache = held(family)
        rows = [cache.tokens[0][:3], *cache.tokens[1:]]
        reused[family] = made(model_of(family), rows, cache=cache, whole=True).reused
    assert reused["llama"] == reused["deepseek_v3"] == [2, 1 + NEW, 3 + NEW]
    assert reused["gemma2"] == reused["mamba"] == reused["qwen3_next"] == [0, 1 + NEW, 3 + NEW]


def test_several_turns_with_one_cache_equal_one_run() -> None:
    for family in ("gemma2", "qwen3_next"):
        model, rows = model_of(family), [list(row) for row in PROMPTS]
        cache = model.new_cache(3)
        for turn in range(3):
            fed = PROMPTS if turn == 0 else [row[turn % 2 : 3] for row in MORE]
            rows = rows if turn == 0 else added(rows, fed)
            result = made(model, fed, cache=cache, whole=False, prefill_chunk=2)
            check(model, result, rows)
            rows = cache.tokens


# -- one row for many --------------------------------------------------------------------------------------------------


@every_family
def test_a_cache_of_one_row_serves_several_prompts_and_stays_as_it_is(family: str) -> None:
    model, cache = model_of(family), held(family).select([0])
    before = cache.tokens
    result = made(model, MORE, cache=cache, whole=False)
    check(model, result, added(before * 3, MORE))
    result = made(model, added(before * 3, MORE), cache=cache)
    check(model, result, added(before * 3, MORE))
    assert result.reused == [len(before[0])] * 3
    assert cache.tokens == before
    check(model, made(model, [[9]], cache=cache), [before[0] + [9]])


@every_family
def test_samples_of_a_cached_prompt_are_those_from_scratch(family: str) -> None:
    model = model_of(family)
    draws: dict[str, Any] = dict(do_sample=True, seed=7, top_k=20, temperature=1.5)
    cache = held(family).select([2])
    row = cache.tokens[0] + MORE[2]
    several = made(model, [MORE[2]], cache=cache, whole=False, num_return_sequences=3, row_ids=[4, 9, 2], **draws)
    expected = [made(model, [row], row_ids=[number], **draws).tokens[0] for number in (4, 9, 2)]
    assert several.tokens == expected
    assert len(set(map(tuple, expected))) > 1
    assert several.cache.tokens == added([row] * 3, expected)
    assert cache.tokens == [row]  # the prompt was fed once, to the cache that was given


@every_family
def test_what_comes_next_draws_as_the_whole_prompt_would(family: str) -> None:
    model = model_of(family)
    draws: dict[str, Any] = dict(do_sample=True, seed=7, top_k=20, temperature=1.5)
    cache = held(family)
    rows = added(cache.tokens, MORE)
    expected = [made(model, [row], **draws).tokens[0] for row in rows]
    assert made(model, MORE, cache=cache, whole=False, **draws).tokens == expected
    assert made(model, rows, cache=held(family, slack=2), whole=True, **draws).tokens == expected


# -- how it is fed -----------------------------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_prompts_fed_in_pieces_give_the_same_tokens(family: str, chunk: int) -> None:
    model = model_of(family)
    check(model, made(model, PROMPTS, prefill_chunk=chunk), PROMPTS)
    cache = held(family)
    rows = added(cache.tokens, MORE)
    check(model, made(model, rows, cache=cache, prefill_chunk=chunk), rows)


@every_family
def test_without_a_cache_the_tokens_are_the_same(family: str) -> None:
    model = model_of(family)
    for settings in (
        dict(), dict(do_sample=True, seed=3, num_return_sequences=2, top_k=20, repetition_penalty=1.3),
        dict(num_beams=3, num_return_sequences=2), dict(prompt_lookup_num_tokens=3), dict(assistant_early_exit=1),
        dict(penalty_alpha=0.6, top_k=3), dict(dola_layers="low"), dict(guidance_scale=1.5, prefill_chunk=3),
    ):  # fmt: skip
        result = made(model, PROMPTS, use_cache=False, **settings)
        assert result.tokens == made(model, PROMPTS, **settings).tokens
        with pytest.raises(InputError, match="use_cache=False keeps nothing"):
            _ = result.cache
    with pytest.raises(InputError, match="use_cache=False and a cache were given"):
        made(model, MORE, use_cache=False, cache=held(family))


@every_family
def test_embedded_prompts_equal_ids_and_go_on(family: str) -> None:
    model = model_of(family)
    embeds = [model.embed(torch.tensor([row]))[0] for row in PROMPTS]
    expected = made(model, PROMPTS)
    for chunk in (None, 2):
        result = made(model, None, inputs_embeds=embeds, prefill_chunk=chunk)
        assert result.tokens == expected.tokens
        assert result.cache.tokens == [[-1] * len(row) + new for row, new in zip(PROMPTS, result.tokens, strict=True)]
    rows = added(expected.cache.tokens, MORE)
    assert made(model, MORE, cache=result.cache.fork(), whole=False).tokens == scratch(model, rows)
    assert made(model, None, cache=result.cache.fork()).tokens == scratch(model, expected.cache.tokens)
    more = [model.embed(torch.tensor([row]))[0] for row in MORE]
    assert made(model, None, inputs_embeds=more, cache=result.cache).tokens == scratch(model, rows)
    with pytest.raises(InputError, match="embeddings cannot be compared with the tokens of the cache"):
        made(model, None, inputs_embeds=more, cache=result.cache, whole=True)


def test_drafts_and_guidance_continue_a_cache_as_from_scratch() -> None:
    for family in ("gemma2", "falcon_h1"):
        model = model_of(family)
        for settings in (dict(prompt_lookup_num_tokens=3), dict(assistant_early_exit=1), dict(guidance_scale=1.6)):
            cache = held(family)
            rows = added(cache.tokens, MORE)
            result = made(model, MORE, cache=cache, whole=False, **settings)
            assert result.tokens == scratch(model, rows, **settings)
            assert made(model, None, cache=cache, **settings).tokens == scratch(
                model, added(rows, result.tokens), **settings
            )


def test_guidance_says_what_it_cannot_lead_away_from() -> None:
    model = model_of("llama")
    embeds = [model.embed(torch.tensor([row]))[0] for row in PROMPTS]
    with pytest.raises(InputError, match="the prompt's last token, and that was embedded: give a negative_prompt"):
        made(model, None, inputs_embeds=embeds, guidance_scale=2.0)
    led = made(model, None, inputs_embeds=embeds, guidance_scale=2.0, negative_prompt=[[4]])
    assert led.tokens == scratch(model, PROMPTS, guidance_scale=2.0, negative_prompt=((4,),))
    with pytest.raises(InputError, match=r"guidance_scale=2\.0: T5 reads a source"):
        made(t5_pair("tied")[1], PROMPTS, guidance_scale=2.0)


# -- sources -----------------------------------------------------------------------------------------------------------


def test_a_decoder_goes_on_with_its_source_and_starts_anew_with_another() -> None:
    model = t5_pair("own head, few buckets, gated silu")[1]
    sources, others = PROMPTS, [[8, 3], [50, 51, 52], [9]]
    first = made(model, sources)
    begun = first.cache.tokens
    assert begun == [[0, *new] for new in first.tokens]

    def alone(source: list[list[int]], rows: list[list[int]]) -> list[list[int]]:
        pairs = zip(source, rows, strict=True)
        return [made(model, [one], decoder_input_ids=[row]).tokens[0] for one, row in pairs]

    for fed, whole in ((MORE, False), (added(begun, MORE), True), (added(begun, MORE), None)):
        result = made(model, None, decoder_input_ids=fed, cache=first.cache.fork(), whole=whole)
        assert result.tokens == alone(sources, added(begun, MORE))
        assert result.reused == [len(row) if whole is not False else 0 for row in begun]
    assert made(model, None, cache=first.cache.fork()).tokens == alone(sources, begun)
    with pytest.raises(InputError, match="encoder_no_repeat_ngram_size=2 reads the source's ids, and none were given"):
        made(model, None, cache=first.cache, encoder_no_repeat_ngram_size=2)
    anew = made(model, others, decoder_input_ids=begun, cache=first.cache)
    assert anew.tokens == alone(others, begun) and anew.reused == [0, 0, 0]
    assert made(model, sources, use_cache=False).tokens == first.tokens
