"""A ring against a plain list: 2,000 random histories, with a number of its own for every token ever given."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from lamina import Cache, RewindError
from lamina.attention.window import Chunked, Sliding, Window
from lamina.cache import Tokens

DTYPE = torch.float64


def visible(window: Window, row: list[float], q: int) -> list[float]:
    match window:
        case Sliding(size=size, keep=keep):
            return [x for p, x in enumerate(row[: q + 1]) if q - p < size or p < keep]
        case Chunked(size=size):
            return row[q - q % size : q + 1]
    raise AssertionError(window)


class Ring:
    """A cache with a single ring of one number a token, and the lists it must equal."""

    def __init__(self, window: Window, slack: int, rows: int, capacity: int | None, rng: random.Random) -> None:
        self.window, self.slack, self.rng = window, slack, rng
        self.cache = Cache([{"x": Tokens(1, window)}], rows=rows, capacity=capacity, slack=slack, dtype=DTYPE)
        self.rows: list[list[float]] = [[] for _ in range(rows)]
        self.highest = [0] * rows  # the longest each row has been
        self.numbers = itertools.count(1)

    def feed(self, outcome: str) -> None:
        rng, rows = self.rng, len(self.rows)
        T = rng.choice([1, 1, 1, 2, 3, rng.randint(1, 9)])
        counts = [rng.randint(0, T) for _ in range(rows)] if rng.random() < 0.5 else None
        real = counts or [T] * rows
        new = [[float(next(self.numbers)) for _ in range(T)] for _ in range(rows)]
        if rng.random() < 0.5:
            self.cache.poison()
        step = self.cache.step(T, counts)
        kept, seen = step.memory(0).recall(torch.tensor(new, dtype=DTYPE)[..., None])
        for r in range(rows):
            row = self.rows[r] + new[r][: real[r]]
            for t in range(real[r]):
                found = kept[r, :, 0][seen[r, t]].tolist()
                assert sorted(found) == visible(self.window, row, len(self.rows[r]) + t)
        if outcome == "fail":
            step.abort()
            return
        accepted = [rng.randint(0, n) for n in real] if outcome == "accept some" else None
        step.commit(accepted)
        for r, n in enumerate(accepted or real):
            self.rows[r] += new[r][:n]
            self.highest[r] = max(self.highest[r], len(self.rows[r]))

    def rewind(self) -> None:
        possible = self.cache.rewindable.tolist()
        for r, (row, back) in enumerate(zip(self.rows, possible, strict=True)):
            promised = self.slack - (self.highest[r] - len(row))
            assert min(promised, len(row)) <= back <= len(row)
        amounts = [self.rng.choice([0, back, self.rng.randint(0, back)]) for back in possible]
        self.cache.rewind(amounts)
        for row, n in zip(self.rows, amounts, strict=True):
            del row[len(row) - n :]

    def rewind_too_far(self) -> None:
        before = self.cache.lengths.tolist()
        with pytest.raises(RewindError):
            self.cache.rewind([back + 1 for back in self.cache.rewindable.tolist()])
        assert self.cache.lengths.tolist() == before


@pytest.mark.parametrize("part", range(4))
def test_a_ring_under_random_histories_equals_a_plain_list(part: int) -> None:
    for seed in range(500 * part, 500 * (part + 1)):
        rng = random.Random(seed)
        size, slack = rng.randint(1, 6), rng.randint(0, 4)
        window = rng.choice([Sliding(size), Sliding(size, keep=rng.randint(1, 4)), Chunked(size)])
        ring = Ring(window, slack, rng.randint(1, 2), rng.choice([None, 200]), rng)
        for _ in range(12):
            match rng.choice(["feed", "feed", "feed", "accept some", "fail", "rewind", "rewind", "too far"]):
                case "rewind":
                    ring.rewind()
                case "too far":
                    ring.rewind_too_far()
                case outcome:
                    ring.feed(outcome)
        assert ring.cache.lengths.tolist() == [len(row) for row in ring.rows]
