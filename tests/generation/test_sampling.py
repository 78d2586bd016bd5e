"""Sampling through `generate`: a token depends on the seed, its prompt and its position, and not on the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.errors import InputError
from lamina.generation import Result
from lamina.model import Model
from tests.families import test_t5
from tests.families.harness import pair
from tests.generation.statistics import chance

PROMPTS = [[5, 9, 12, 3, 44, 8, 21], [7], [30, 31, 32], [7]]
NEW = 8


@pytest.fixture(scope="module")
def model() -> Model:
    return pair("gemma2", "sliding and full in turn")[1]


def sampled(model: Model, prompts: list[list[int]], **settings: Any) -> Result:
    return model.generate(prompts, **dict(max_new_tokens=NEW, do_sample=True, seed=11, eos_token_id=()) | settings)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": dict(top_k=5, temperature=0.7),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "early exit": dict(assistant_early_exit=2, num_assistant_tokens=3),
    "beams": dict(num_beams=3),
    "dola": dict(dola_layers="high"),
    "no cache": dict(use_cache=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_draws_the_same_alone_and_in_any_batch(model: Model, way: str) -> None:
    together = sampled(model, PROMPTS, **WAYS[way]).tokens
    for row in (0, 1, 2):
        assert sampled(model, [PROMPTS[row]], **WAYS[way]).tokens == [together[row]]
    assert sampled(model, [PROMPTS[1]] * 2, **WAYS[way]).tokens == [together[1], together[3]]
    turned = sampled(model, [PROMPTS[row] for row in (2, 1, 3, 0)], **WAYS[way]).tokens
    assert turned == [together[row] for row in (2, 1, 3, 0)]
    assert together[1] != together[3]  # the same prompt for the second time


@pytest.mark.parametrize("way", ["plain", "prompt lookup", "beams"])
def test_a_row_with_a_number_of_its_own_draws_by_that(model: Model, way: str) -> None:
    numbers = [2**32 - 1, 0, 9, 2**31]
    together = sampled(model, PROMPTS, row_ids=numbers, **WAYS[way]).tokens
    for row, prompt in enumerate(PROMPTS):
        assert sampled(model, [prompt], row_ids=[numbers[row]], **WAYS[way]).tokens == [together[row]]
    turned = sampled(model, PROMPTS[::-1], row_ids=torch.tensor(numbers[::-1]), **WAYS[way]).tokens
    assert turned == together[::-1]
    assert together != sampled(model, PROMPTS, **WAYS[way]).tokens


def test_equal_prompts_draw_differently_however_many_there_are(model: Model) -> None:
    settings: dict[str, Any] = dict(temperature=5.0, top_k=0)
    rows = sampled(model, [PROMPTS[2]] * 40, **settings).tokens
    assert len(set(map(tuple, rows))) == 40
    assert rows == sampled(model, [PROMPTS[2]] * 20, num_return_sequences=2, **settings).tokens
    assert rows == sampled(model, [PROMPTS[2]], num_return_sequences=40, **settings).tokens


@pytest.mark.parametrize("given", [5, "12", [1.0, 2, 3, 4], [-1, 1, 2, 3], [True, 1, 2, 3], [2**32, 1, 2, 3]])
def test_numbers_of_rows_are_whole_and_of_32_bits(model: Model, given: Any) -> None:
    with pytest.raises(InputError, match=r"row_ids.* must be a "):
        sampled(model, PROMPTS, row_ids=given)


def test_functions_count_rows_by_their_place_in_the_call(model: Model) -> None:
    for settings in ({}, {"num_beams": 2}, {"row_ids": [7, 7, 8, 9]}):
        asked: set[int] = set()

        def listed(row: int, tokens: torch.Tensor, asked: set[int] = asked) -> list[int]:
            asked.add(row)
            return [row + 1, row + 2, row + 3]

        sampled(model, PROMPTS, prefix_allowed_tokens_fn=listed, **settings)
        assert asked == {0, 1, 2, 3}


def test_a_prompt_draws_the_same_embedded_where_its_ids_are_known(model: Model) -> None:
    embeds = [model.embed(torch.tensor([row]))[0] for row in PROMPTS]
    together = sampled(model, None, inputs_embeds=embeds).tokens  # type: ignore[arg-type]
    assert together[0] == sampled(model, None, inputs_embeds=embeds[:1]).tokens[0]  # type: ignore[arg-type]
    assert together[1] != together[3]
    assert sampled(model, PROMPTS, inputs_embeds=embeds).tokens == sampled(model, PROMPTS).tokens


def test_a_source_draws_the_same_alone_and_in_any_batch() -> None:
    reads = test_t5.pair(test_t5.FIRST)[1]
    rows = test_t5.random_rows([9, 2, 5], seed=3)
    together = sampled(reads, rows, decoder_input_ids=[[4], [4], [4]]).tokens
    for row, source in enumerate(rows):
        assert sampled(reads, [source], decoder_input_ids=[[4]]).tokens == [together[row]]
    assert sampled(reads, [rows[0]] * 2).tokens[0] != sampled(reads, [rows[0]] * 2).tokens[1]


def test_a_drafted_run_draws_what_a_plain_one_draws(model: Model) -> None:
    assert sampled(model, PROMPTS, prompt_lookup_num_tokens=3).tokens == sampled(model, PROMPTS).tokens


def test_several_sequences_of_a_prompt_are_rows_of_their_own(model: Model) -> None:
    result = sampled(model, PROMPTS[:2], num_return_sequences=3)
    assert result.tokens == sampled(model, [row for row in PROMPTS[:2] for _ in range(3)]).tokens
    assert result.prompts == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert len(set(map(tuple, result.tokens))) == 6
    assert result.cache.tokens == [p + t for p, t in zip(result.prompts, result.tokens, strict=True)]
    numbers = [8, 1, 5, 0, 9, 9]
    alone = [sampled(model, [row], row_ids=[n]) for row, n in zip(result.prompts, numbers, strict=True)]
    found = sampled(model, PROMPTS[:2], num_return_sequences=3, row_ids=numbers)
    assert found.tokens == [one.tokens[0] for one in alone]
    assert found.tokens[4] == found.tokens[5]
    with pytest.raises(InputError, match="row_ids has 2 ids for 6 sequences: give one for each"):
        sampled(model, PROMPTS[:2], num_return_sequences=3, row_ids=[1, 2])


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(model: Model) -> None:
    first = sampled(model, PROMPTS).tokens
    assert sampled(model, PROMPTS).tokens == first
    assert sampled(model, PROMPTS, seed=12).tokens != first
    assert sampled(model, PROMPTS, seed=11 + 2**33).tokens != first


def test_without_a_seed_torch_s_own_decides(model: Model) -> None:
    torch.manual_seed(3)
    first, second = (sampled(model, PROMPTS, seed=None).tokens for _ in range(2))
    assert first != second
    torch.manual_seed(3)
    assert sampled(model, PROMPTS, seed=None).tokens == first
    before = torch.get_rng_state()
    model.generate(PROMPTS, 2)
    sampled(model, PROMPTS)
    assert torch.equal(torch.get_rng_state(), before)  # who draws nothing, or has a seed, takes none of it


def test_tokens_are_drawn_with_their_probabilities(model: Model) -> None:
    draws = 2000
    settings: dict[str, Any] = dict(max_new_tokens=1, top_k=6, temperature=1.3, repetition_penalty=1.2)
    result = sampled(model, [PROMPTS[0]], num_return_sequences=draws, output_scores=True, **settings)
    counts = torch.tensor(result.tokens)[:, 0].bincount(minlength=model.vocab)
    shares = result.scores[0][0].softmax(dim=-1)
    assert int((shares > 0).sum()) == 6 and int(counts[shares == 0].sum()) == 0
    assert chance(counts, shares) > 1e-3
