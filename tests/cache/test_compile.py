"""A compiled pass over a fixed cache: one graph a width, whatever the lengths, before, at and after the window."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lamina import Cache, Pool
from tests.laws.toys import KINDS, EncoderDecoder, assert_close, random_ids, toy, truth

ROWS, LENGTH = 2, 24


def fixed_cache(kind: str, slack: int = 0, page: int | None = None) -> tuple[Cache, list[tuple[int, ...] | None]]:
    model = toy(kind)
    pool = None if page is None else Pool(model, tokens=200, page=page, slack=slack)
    cache = model.new_cache(ROWS, capacity=64, slack=slack, pool=pool)
    if not isinstance(model, EncoderDecoder):
        return cache, [None] * ROWS
    ids = random_ids(ROWS, 5, seed=7)
    cache.attach(model.encode(ids))
    return cache, [tuple(row) for row in ids.tolist()]


def run(kind: str, compiled: Any, T: int, slack: int = 0, page: int | None = None) -> None:
    """Decodes T tokens at a time, some of them refused, and compares everything with the uncached pass."""
    cache, sources = fixed_cache(kind, slack, page)
    ids = random_ids(ROWS, LENGTH, seed=3)
    for at in range(0, LENGTH, T):
        piece = ids[:, at : at + T].contiguous()
        if at == 2 * T:  # a pass that is dropped
            step = cache.step(T)
            compiled(piece.flip(0), step)
            step.abort()
        step = cache.step(T)
        found = compiled(piece, step)
        step.commit()
        for r in range(ROWS):
            expected = truth(kind, tuple(ids[r, : at + T].tolist()), sources[r])[at:]
            assert_close(found[r], expected, f"{kind}, tokens {at} to {at + T}")
    assert cache.tokens == ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_every_length_and_gives_the_uncached_logits(kind: str) -> None:
    for T, slack in ((1, 0), (4, 2)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run(kind, torch.compile(toy(kind).forward, fullgraph=True, backend=counter), T, slack)
        assert counter.frame_count == 1, f"{kind}: {counter.frame_count} compilations for {T} tokens at a time"


@pytest.mark.parametrize("kind", ["sliding and full", "latent, sliding"])
def test_one_graph_serves_every_length_of_a_cache_in_pages(kind: str) -> None:
    for T, slack in ((1, 0), (4, 2)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run(kind, torch.compile(toy(kind).forward, fullgraph=True, backend=counter), T, slack, page=5)
        assert counter.frame_count == 1, f"{kind}: {counter.frame_count} compilations for {T} tokens at a time"


@pytest.mark.parametrize("kind", ["sliding, keep", "hybrid"])
def test_one_graph_serves_any_counts(kind: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(toy(kind).forward, fullgraph=True, backend=counter)
    cache, rng = toy(kind).new_cache(ROWS, capacity=64, slack=1), random.Random(0)
    rows: list[list[int]] = [[] for _ in range(ROWS)]
    for _ in range(8):
        counts = [rng.randint(0, 3) for _ in range(ROWS)]
        ids = random_ids(ROWS, 3, seed=rng.randint(0, 99))
        step = cache.step(3, counts)
        found = compiled(ids, step)
        step.commit()
        for r, count in enumerate(counts):
            rows[r] += ids[r, :count].tolist()
            if count:
                assert_close(found[r, :count], truth(kind, tuple(rows[r]))[-count:], kind)
        assert cache.tokens == rows
    assert counter.frame_count == 1


def test_inductor_decodes_past_a_sliding_window() -> None:
    torch._dynamo.reset()
    run("sliding", torch.compile(toy("sliding").forward, fullgraph=True), T=1)
