"""Captured passes of several tokens give what plain passes give: logits, and the cache after any number was accepted."""

from __future__ import annotations

import random

import pytest
import torch

import lamina
from lamina.model import Model
from lamina.runtime import Graphs
from lamina.runtime.passes import CapturedPass
from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.kernels.runs import PROMPTS, start

pytestmark = pytest.mark.usefixtures("few_programs")


def plainly(
    model: Model, cache: lamina.Cache, ids: torch.Tensor, counts: list[int], accepted: list[int]
) -> torch.Tensor:
    step = cache.step(ids.shape[1], counts)
    logits = model.forward(ids, step, logits="all")
    step.commit(accepted)
    assert logits is not None
    return logits


def random_pass(rng: random.Random, rows: int, T: int, vocab: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """Ids, and ragged counts and accepted ones."""
    counts = [rng.randint(0, T) for _ in range(rows)]
    counts[rng.randrange(rows)] = T
    ids = torch.tensor([[rng.randrange(vocab) for _ in range(T)] for _ in range(rows)])
    return ids, counts, [rng.randint(0, count) for count in counts]


def same(cache: lamina.Cache, plain: lamina.Cache) -> None:
    assert cache.tokens == plain.tokens
    assert bool((cache.rewindable >= plain.rewindable).all())  # plain passes write a single token at once
    assert cache.clock.low == plain.clock.low and cache.clock.high == plain.clock.high
    assert cache.logits is not None and plain.logits is not None
    torch.testing.assert_close(cache.logits, plain.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "name"), FIRST)
def test_captured_and_plain_passes_give_the_same_whatever_is_accepted(family: str, name: str) -> None:
    model, rng = pair(family, name)[1], random.Random(1)
    captured, plain = start(model)[0], start(model)[0]
    graphs = Graphs(model)
    for T in (4, 2, 1):
        ids, counts, accepted = random_pass(rng, 2, T, 60)
        one: CapturedPass = graphs.pass_of(2, T)
        logits, expected = one.read(captured, ids, counts), plainly(model, plain, ids, counts, accepted)
        for row, count in enumerate(counts):
            torch.testing.assert_close(logits[row, :count], expected[row, :count], rtol=1e-4, atol=1e-4)
        one.commit(accepted)
        captured.poison()
        same(captured, plain)
    assert [len(row) for row in captured.tokens] != [len(row) for row in PROMPTS]
    more = torch.tensor([[1, 2], [3, 4]])  # and plain passes go on from it
    torch.testing.assert_close(model(more, cache=captured), model(more, cache=plain), rtol=1e-4, atol=1e-4)
