"""Sampling through `generate`: a token depends on the seed, its row's number and its position, and on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.errors import InputError
from lamina.generation import Result
from lamina.model import Model
from tests.families.harness import pair
from tests.generation.statistics import chance

PROMPTS = [[5, 9, 12, 3, 44, 8, 21], [7], [30, 31, 32], [7]]
NEW = 8


@pytest.fixture(scope="module")
def model() -> Model:
    return pair("gemma2", "sliding and full in turn")[1]


def sampled(model: Model, prompts: list[list[int]], **settings: Any) -> Result:
    return model.generate(prompts, **dict(max_new_tokens=NEW, do_sample=True, seed=11, eos_token_id=()) | settings)


@pytest.mark.parametrize(
    "settings", [{}, dict(top_k=5, temperature=0.7), dict(prompt_lookup_num_tokens=3)], ids=["plain", "cut", "drafted"]
)
def test_a_row_draws_the_same_in_any_batch(model: Model, settings: dict[str, Any]) -> None:
    together = sampled(model, PROMPTS, **settings).tokens
    for row, prompt in enumerate(PROMPTS):
        assert sampled(model, [prompt], row_ids=[row], **settings).tokens == [together[row]]
    turned = sampled(model, PROMPTS[::-1], row_ids=[3, 2, 1, 0], **settings).tokens
    assert turned == together[::-1]
    assert together[1] != together[3]  # the same prompt, another number


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
    with pytest.raises(InputError, match="row_ids has 2 numbers for 6 sequences: give one for each"):
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
