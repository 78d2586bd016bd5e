"""A compiled pass over a fixed cache: one graph a width, whatever the lengths, before, at and after the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lamina import Cache
from tests.laws.toys import KINDS, EncoderDecoder, assert_close, random_ids, toy, truth

ROWS, LENGTH = 2, 24


def fixed_cache(kind: str, slack: int = 0) -> tuple[Cache, list[tuple[int, ...] | None]]:
    model = toy(kind)
    cache = model.new_cache(ROWS, capacity=64, slack=slack)
    if not isinstance(model, EncoderDecoder):
        return cache, [None] * ROWS
    ids = random_ids(ROWS, 5, seed=7)
    cache.attach(model.encode(ids))
    return cache, [tuple(row) for row in ids.tolist()]


def run(kind: str, compiled: Any, T: int, slack: int = 0) -> None:
    """Decodes T tokens at a time, some of them refused, and compares everything with the uncached pass."""
    cache, sources = fixed_cache(kind, slack)
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
    for T in (1, 4):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run(kind, torch.compile(toy(kind).forward, fullgraph=True, backend=counter), T)
        assert counter.frame_count == 1, f"{kind}: {counter.frame_count} compilations for {T} tokens at a time"


def test_inductor_decodes_past_a_sliding_window() -> None:
    torch._dynamo.reset()
    run("sliding", torch.compile(toy("sliding").forward, fullgraph=True), T=1)
