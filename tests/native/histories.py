"""Random histories of a cache: native steps between passes, rewinds and forks, beside plain passes for the same."""

from __future__ import annotations

import random
from typing import Any

import torch

import lamina
from lamina.model import Model
from lamina.runtime import Graphs
from lamina.sampling.chooser import Chooser

TURNS = 8


@torch.no_grad()
def compare(model: Model, seed: str, limit: float = 1e-4, rows: int = 3, **keeping: Any) -> Graphs:
    """Raises AssertionError where a cache that native steps went over differs from one of plain passes.

    Slots that hold no token are NaN before each native step. Sources, where a model reads one, are those of `attach`.
    """
    pick, graphs = random.Random(seed), Graphs(model)
    native, plain = (attach(model, model.new_cache(rows, **keeping)) for _ in range(2))
    with graphs.step(rows, Chooser(), native, native=True) as step:
        for _ in range(TURNS):
            ids = torch.randint(0, model.vocab, (rows, 5), generator=torch.Generator().manual_seed(pick.randrange(99)))
            counts = [pick.randint(1, 5) for _ in range(rows)]
            for cache in (native, plain):
                model(ids, cache=cache, counts=counts)
            if pick.random() < 0.4:
                go_back(pick, native, plain)
            if pick.random() < 0.4:
                order = [pick.randrange(rows) for _ in range(rows)]
                native, plain = native.select(order), plain.select(order)
            native.poison()
            first = torch.tensor([pick.randrange(model.vocab) for _ in range(rows)])
            remaining = [pick.randint(0, 4) for _ in range(rows)]
            step.begin(native, first, remaining, ())
            step.run(max(remaining))
            feed(model, plain, first, remaining)
            assert native.tokens == plain.tokens
            assert native.clock.sync() == plain.clock.sync()
            torch.testing.assert_close(native.logits, plain.logits, rtol=limit, atol=limit, equal_nan=True)
            if pick.random() < 0.3:
                go_back(pick, native, plain)
    return graphs


def go_back(pick: random.Random, native: lamina.Cache, plain: lamina.Cache) -> None:
    """Rewinds both caches, which can be rewound equally far, by up to three tokens."""
    assert torch.equal(native.rewindable, plain.rewindable)
    back = [pick.randint(0, min(int(most), 3)) for most in native.rewindable]
    native.rewind(back), plain.rewind(back)


def attach(model: Model, cache: lamina.Cache) -> lamina.Cache:
    if cache.reads_source:
        counts = [1 + row % 4 for row in range(cache.rows)]
        cache.attach(model.encode([[1, 2, 3, row] for row in range(cache.rows)], counts=counts))  # type: ignore[attr-defined]
    return cache


def feed(model: Model, cache: lamina.Cache, first: torch.Tensor, remaining: list[int]) -> None:
    """Greedy plain passes over the rows that go on."""
    ids = first.clone()
    for done in range(max(remaining)):
        live = [row for row, most in enumerate(remaining) if most > done]
        step = cache.step(1, rows=live)
        logits = model.forward(ids[live, None], step, logits="last")
        assert logits is not None
        step.commit()
        ids[live] = logits.argmax(-1)
