"""Counts that the host does not see: it goes on with bounds, and asks the device only when it must."""

from __future__ import annotations

import random

import pytest
import torch

from lamina import CapacityError, InputError
from lamina.cache.clock import Clock
from lamina.cache.counts import Counts
from tests.laws.toys import random_ids, toy
from tests.laws.world import World, counts_on_the_device

MESSAGE = "counts given on the device were negative or larger than the tokens of their pass; they were clamped"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with every time lengths or counts are read back because the host is not sure of them."""
    found: list[str] = []
    sync, read = Clock.sync, Counts.read

    def counted_sync(clock: Clock) -> list[int]:
        if not clock.exact:
            found.append("lengths")
        return sync(clock)

    def counted_read(counts: Counts) -> list[int]:
        if counts.low != counts.high:
            found.append("counts")
        return read(counts)

    monkeypatch.setattr(Clock, "sync", counted_sync)
    monkeypatch.setattr(Counts, "read", counted_read)
    return found


def run(world: World, T: int, counts: list[int]) -> None:
    with counts_on_the_device():
        step = world.cache.step(T, counts)
        world.model.forward(random_ids(len(counts), T), step)
        step.commit()


@pytest.mark.parametrize("kind", ["sliding and full", "hybrid"])
def test_lengths_are_read_only_when_a_bound_reaches_the_capacity(kind: str, reads: list[str]) -> None:
    world = World.fresh(kind, 2, capacity=40)
    for _ in range(10):
        run(world, 4, [1, 0])
    assert not reads
    run(world, 4, [1, 2])  # 10 passes of up to 4 tokens may have filled the row, and have not
    assert reads == ["lengths", "counts"]
    assert world.cache.lengths.tolist() == [11, 2]


def test_a_wrapped_ring_that_has_all_its_slots_needs_no_reading(reads: list[str]) -> None:
    world = World.fresh("sliding", 2)
    run(world, 4, [4, 1])
    del reads[:]
    for _ in range(20):
        run(world, 4, [4, 1])
    assert not reads
    assert world.cache.lengths.tolist() == [84, 21]


def test_growth_reads_once_each_time_it_happens(reads: list[str]) -> None:
    world = World.fresh("full", 1)
    for _ in range(64):
        run(world, 2, [2])
    assert world.cache.lengths.tolist() == [128]
    assert len(reads) <= 8  # lengths and counts, for 32, 64 and 128 slots and once for the bounds in between


def test_the_capacity_is_kept_exactly_all_the_same() -> None:
    world = World.fresh("full", 2, capacity=10)
    for _ in range(5):
        run(world, 3, [2, 1])
    with pytest.raises(CapacityError, match="row 0 holds 10 tokens and 1 more were given, but the capacity is 10"):
        run(world, 3, [1, 3])
    run(world, 3, [0, 3])
    assert world.cache.lengths.tolist() == [10, 8]


def test_a_count_out_of_range_is_clamped_and_told_at_the_next_reading() -> None:
    world = World.fresh("full", 2, capacity=20)
    run(world, 3, [5, -2])
    with pytest.raises(InputError, match=MESSAGE):
        _ = world.cache.tokens
    assert world.cache.lengths.tolist() == [3, 0]
    assert [len(row) for row in world.cache.tokens] == [3, 0]
    toy("full")(torch.tensor([[1], [2]]), cache=world.cache)


def test_recurrent_logs_never_overflow_unseen() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        world = World.fresh("ssd", 1, slack=rng.randint(1, 3), seed=seed)
        for _ in range(12):
            T = rng.randint(1, 4)
            world.feed(T, [rng.randint(0, T)], unread=rng.random() < 0.4)
            if rng.random() < 0.3:
                world.rewind([rng.randint(0, back) for back in world.cache.rewindable.tolist()])
