"""A compiled pass over a fixed cache: one graph a width, whatever the lengths, before, at and after the window."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lamina import Attention, Cache, Chunked, Latent, Pool, Recurrent, Sliding, Spec, Tokens
from tests.laws import toys
from tests.laws.toys import KINDS, EncoderDecoder, Toy, assert_close, random_ids, toy, truth

ROWS, LENGTH = 2, 24

# Tracing takes most of the time, so each stack has one block of each of several kinds instead of two of one.
STACKS: dict[str, Callable[[], Toy]] = {
    "windows": lambda: Toy(
        toys.Attend(), toys.Attend(Sliding(4)), toys.Attend(Sliding(1)), toys.Attend(Sliding(4, keep=2)),
        toys.Attend(Sliding(3, keep=5)), toys.Attend(Chunked(4)), toys.Attend(Sliding(4), 32, 37),
    ),
    "latents and tokens": lambda: Toy(
        toys.AttendLatent(rank=6), toys.AttendLatent(rank=20, window=Sliding(4)), toys.AttendLatent(rank=3),
        toys.Index(), toys.Index(Sliding(4)), toys.AttendSelected(3), toys.AttendSelected(source=5),
    ),
    "recurrences": lambda: Toy(
        toys.Convolve(4), toys.Convolve(1), toys.Recur(toys.SCAN), toys.Recur(toys.DUAL), toys.Recur(toys.DELTA),
        toys.Forgetful(), toys.Highest(),
    ),
    "hybrid": lambda: Toy(toys.Together()),
    "cross": lambda: EncoderDecoder(toys.AttendCross()),
    "shared": lambda: Toy(
        toys.Attend(), toys.Attend(Sliding(4)), toys.AttendShared(0), toys.AttendShared(1), toys.AttendShared(1)
    ),
    "nothing to remember": lambda: Toy(toys.Forgetful()),
}  # fmt: skip
SMALL: dict[str, Callable[[], Toy]] = {
    "sliding": lambda: Toy(toys.Attend(Sliding(4))),
    "sliding and full": lambda: Toy(toys.Attend(Sliding(3)), toys.Attend()),
    "latent, sliding": lambda: Toy(toys.AttendLatent(rank=6, window=Sliding(4)), toys.AttendLatent(rank=20)),
}


@functools.cache
def stack(name: str) -> Toy:
    return (STACKS | SMALL)[name]()


@functools.cache
def uncached(name: str, ids: tuple[int, ...], source: tuple[int, ...] | None) -> Tensor:
    """The logits [T, vocab] of one row by itself."""
    logits = stack(name)([list(ids)], source=None if source is None else stack(name).encode([list(source)]))
    assert logits is not None
    return logits[0]


def fixed_cache(name: str, slack: int = 0, page: int | None = None) -> tuple[Cache, list[tuple[int, ...] | None]]:
    model = stack(name)
    pool = None if page is None else Pool(model, tokens=200, page=page, slack=slack)
    cache = model.new_cache(ROWS, capacity=64, slack=slack, pool=pool)
    if not isinstance(model, EncoderDecoder):
        return cache, [None] * ROWS
    ids = random_ids(ROWS, 5, seed=7)
    cache.attach(model.encode(ids))
    return cache, [tuple(row) for row in ids.tolist()]


def run(name: str, compiled: Any, T: int, slack: int = 0, page: int | None = None) -> None:
    """Decodes T tokens at a time, one pass of them dropped, and compares everything with the uncached pass."""
    cache, sources = fixed_cache(name, slack, page)
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
            expected = uncached(name, tuple(ids[r].tolist()), sources[r])[at : at + T]
            assert_close(found[r], expected, f"{name}, tokens {at} to {at + T}")
    assert cache.tokens == ids.tolist()


def what_differs(spec: Spec) -> tuple[Any, ...]:
    """What of a spec changes the program that is traced."""
    match spec:
        case Attention(window=window) | Latent(window=window) | Tokens(window=window):
            return type(spec), type(window), getattr(window, "keep", 0) > 0
        case Recurrent(rule=rule):
            return type(spec), type(rule)
    return (type(spec),)


def test_every_kind_of_memory_is_in_a_stack() -> None:
    def inside(model: Toy) -> set[tuple[Any, ...]]:
        return {what_differs(spec) for entry in model.specs for spec in entry.values()}

    stacked = {one for name in STACKS for one in inside(stack(name))}
    for kind in KINDS:
        missing = inside(toy(kind)) - stacked
        assert not missing, f"add the blocks of {kind!r} to a stack: {missing}"


@pytest.mark.parametrize("name", STACKS)
def test_one_graph_serves_every_length_and_gives_the_uncached_logits(name: str) -> None:
    for T, slack in ((1, 0), (4, 2)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run(name, torch.compile(stack(name).forward, fullgraph=True, backend=counter), T, slack)
        assert counter.frame_count == 1, f"{name}: {counter.frame_count} compilations for {T} tokens at a time"


@pytest.mark.parametrize("name", ["sliding and full", "latent, sliding"])
def test_one_graph_serves_every_length_of_a_cache_in_pages(name: str) -> None:
    for T, slack in ((1, 0), (4, 2)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run(name, torch.compile(stack(name).forward, fullgraph=True, backend=counter), T, slack, page=5)
        assert counter.frame_count == 1, f"{name}: {counter.frame_count} compilations for {T} tokens at a time"


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
    run("sliding", torch.compile(stack("sliding").forward, fullgraph=True), T=1)
