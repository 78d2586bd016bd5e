"""Greedy generation: every form of prompt, ragged rows, stopping, continuing a cache."""

from __future__ import annotations

import pytest
import torch

import lamina
from lamina.errors import CapacityError, InputError
from lamina.model import Model
from tests.families.cases import FIRST
from tests.families.harness import pair, random_ids

PROMPTS = [[5, 9, 12, 3, 44, 8, 21], [7], [30, 31, 32]]


@pytest.fixture(scope="module")
def model() -> Model:
    return pair("llama", "grouped")[1]


def greedy(model: Model, prompt: list[int], n: int) -> list[int]:
    """The definition: the whole sequence again for every token."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]), logits="last").argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("family", "name"), FIRST, ids=[f for f, _ in FIRST])
def test_ragged_rows_of_every_family_give_what_uncached_passes_give(family: str, name: str) -> None:
    model = pair(family, name)[1]
    result = model.generate(PROMPTS, max_new_tokens=12, eos_token_id=())
    assert result.tokens == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert result.cache.tokens == [p + t for p, t in zip(PROMPTS, result.tokens, strict=True)]


@pytest.mark.parametrize(("family", "name"), FIRST, ids=[f for f, _ in FIRST])
def test_continuing_a_cache_equals_one_run(family: str, name: str) -> None:
    model = pair(family, name)[1]
    whole = [prompt + greedy(model, prompt, 6) + [1, 2] for prompt in PROMPTS]
    first = model.generate(PROMPTS, max_new_tokens=6, eos_token_id=())
    second = model.generate([[1, 2]] * 3, max_new_tokens=5, eos_token_id=(), cache=first.cache)
    assert second.tokens == [greedy(model, row, 5) for row in whole]


def test_a_row_stops_at_eos_and_the_others_go_on(model: Model) -> None:
    free = model.generate(PROMPTS, max_new_tokens=10, eos_token_id=())
    stop = free.tokens[1][3]
    result = model.generate(PROMPTS, max_new_tokens=10, eos_token_id=stop)
    for found, whole, reason in zip(result.tokens, free.tokens, result.reasons, strict=True):
        cut = whole.index(stop) + 1 if stop in whole else len(whole)
        assert found == whole[:cut]
        assert reason == ("eos" if stop in whole else "length")
    assert result.cache.tokens == [p + t for p, t in zip(PROMPTS, result.tokens, strict=True)]


def test_padded_tensors_equal_id_lists(model: Model) -> None:
    expected = model.generate(PROMPTS, eos_token_id=()).tokens
    longest = max(map(len, PROMPTS))
    left, right = torch.full((2, 3, longest), 66)
    left_mask, right_mask = torch.zeros(2, 3, longest, dtype=torch.int64)
    for r, row in enumerate(PROMPTS):
        left[r, longest - len(row) :] = right[r, : len(row)] = torch.tensor(row)
        left_mask[r, longest - len(row) :] = right_mask[r, : len(row)] = 1
    assert model.generate(left, attention_mask=left_mask, eos_token_id=()).tokens == expected
    assert model.generate(right, attention_mask=right_mask, eos_token_id=()).tokens == expected


def test_sequences_hold_prompt_and_new_tokens_padded_on_the_right(model: Model) -> None:
    result = model.generate(PROMPTS, max_new_tokens=4, eos_token_id=())
    assert result.sequences.shape == (3, 11)
    assert result.sequences[1, :5].tolist() == [7, *result.tokens[1]]
    assert (result.sequences[1, 5:] == 0).all()


def test_stream_tells_every_token_in_order(model: Model) -> None:
    seen: list[tuple[int, int]] = []
    result = model.generate(
        PROMPTS, max_new_tokens=4, eos_token_id=(), stream=lambda event: seen.append((event.row, event.token))
    )
    assert [[token for row, token in seen if row == r] for r in range(3)] == result.tokens


def test_bad_prompts_are_refused(model: Model) -> None:
    cache = model.new_cache(rows=2, capacity=8)
    model(random_ids(2, 3, model.vocab), cache=cache)
    for prompts, text in [
        ([], "prompts must be"),
        ("hello", "no tokenizer"),
        ([[1, 2], [67]], "id 67 at row 1, token 0"),
        ([[1, 2]], "1 prompts were given, the cache has 2 rows"),
    ]:
        with pytest.raises(InputError, match=text):
            model.generate(prompts, 3, cache=cache)
    with pytest.raises(InputError, match="prompt 1 is empty"):
        model.generate([[1], []], 3)
    with pytest.raises(InputError, match="gap"):
        model.generate(torch.ones(1, 3, dtype=torch.int64), attention_mask=torch.tensor([[1, 0, 1]]))
    with pytest.raises(InputError, match="max_new_tokens=0: it must be a whole number, at least 1"):
        model.generate([[1]], 0)
    with pytest.raises(CapacityError, match="cannot reserve 9 tokens: the capacity is 8"):
        model.generate([[1, 2], [3]], 4, cache=cache)
    assert cache.lengths.tolist() == [3, 3]
    assert model.generate([[1, 2], [3]], 3, cache=cache, eos_token_id=()).cache.lengths.tolist() == [8, 7]


def test_generate_under_inference_mode_leaves_a_cache_for_outside(model: Model) -> None:
    with torch.inference_mode():
        first = model.generate(PROMPTS, max_new_tokens=4, eos_token_id=())
    assert first.cache.rewind(2).lengths.tolist() == [len(p) + 2 for p in PROMPTS]
    more = model.generate([[1]] * 3, max_new_tokens=2, cache=first.cache, eos_token_id=())
    assert isinstance(more, lamina.generation.Result)
