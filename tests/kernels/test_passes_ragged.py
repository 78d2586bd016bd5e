"""Captured passes one after another, ragged in what is read and in what is accepted, on every kind of layer."""

from __future__ import annotations

import pytest
import torch

import lamina
from lamina.runtime import Graphs
from tests.kernels.passes import compared, same
from tests.kernels.runs import PROMPTS, SMALL, small, start

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.mark.parametrize("family", SMALL)
def test_many_short_passes_give_what_plain_ones_give(family: str) -> None:
    model = small(family)
    compared(model, start(model)[0], start(model)[0], (1, 4, 2), seed=5)


def test_a_pass_of_more_tokens_than_a_ring_has_slots_keeps_the_newest() -> None:
    model = small("gemma2")  # windows of 3
    compared(model, start(model)[0], start(model)[0], (8, 7, 2), seed=2)


@pytest.mark.parametrize("family", ["gemma2", "falcon_h1", "deepseek_v3"])
def test_rows_without_tokens_stay_bit_for_bit(family: str) -> None:
    model = small(family)
    cache = start(model)[0]
    before, one = held_by(cache, 1), Graphs(model).pass_of(2, 2)
    for counts, accepted in (([2, 0], [1, 0]), ([2, 2], [2, 0])):
        one.read(cache, torch.tensor([[1, 2], [3, 4]]), counts)
        one.commit(accepted)
    after = held_by(cache, 1)
    assert cache.tokens[1] == PROMPTS[1] and len(cache.tokens[0]) == len(PROMPTS[0]) + 3
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def held_by(cache: lamina.Cache, row: int) -> list[torch.Tensor]:
    """All that a row holds: its logits, and of each layer its state or the slots of its tokens."""
    assert cache.logits is not None
    found, length = [cache.logits[row].clone()], int(cache.lengths[row])
    for entry in cache.layers:
        for layer in entry.values():
            end = None if layer.slots is None else length
            found += [tensor[row, ..., :end, :].clone() for tensor in layer.data.values()]
    return found


def test_rows_are_chosen_by_their_numbers() -> None:
    model = small("falcon_h1")
    captured, plain = start(model)[0], start(model)[0]
    one, ids = Graphs(model).pass_of(2, 2), torch.tensor([[5, 6]])
    logits, step = one.read(captured, ids, rows=[1]), plain.step(2, rows=[1])
    expected = model.forward(ids, step, logits="all")
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    one.commit([1])
    step.commit([1])
    same(captured, plain)
