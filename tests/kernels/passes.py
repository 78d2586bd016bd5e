"""Captured passes of several tokens beside plain ones, for tests."""

from __future__ import annotations

import random

import torch

import lamina
from lamina.model import Model
from lamina.runtime import Graphs


def plainly(
    model: Model, cache: lamina.Cache, ids: torch.Tensor, counts: list[int], accepted: list[int]
) -> torch.Tensor:
    step = cache.step(ids.shape[1], counts)
    logits = model.forward(ids.to(cache.device), step, logits="all")
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
    torch.testing.assert_close(cache.logits, plain.logits, rtol=1e-4, atol=1e-4, equal_nan=True)  # NaN: not known


def compared(
    model: Model, captured: lamina.Cache, plain: lamina.Cache, widths: tuple[int, ...], seed: int = 1, vocab: int = 60
) -> None:
    """Passes of so many tokens, some of them padding, some refused, through both."""
    rng, graphs = random.Random(seed), Graphs(model)
    for T in widths:
        ids, counts, accepted = random_pass(rng, captured.rows, T, vocab)
        with graphs.pass_of(captured.rows, T, captured) as one:
            logits, expected = one.read(captured, ids, counts), plainly(model, plain, ids, counts, accepted)
            for row, count in enumerate(counts):
                torch.testing.assert_close(logits[row, :count], expected[row, :count], rtol=1e-4, atol=1e-4)
            one.commit(accepted)
        captured.poison()
        same(captured, plain)
