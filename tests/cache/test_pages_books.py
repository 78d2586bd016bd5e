"""The books of a pool: where positions lie, that a wrong book is noticed, and that nothing ever leaks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from lamina import Cache, PagesError, Pool
from lamina.attention.window import Sliding
from lamina.cache import Tokens
from lamina.cache.layers.layout import Layout
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.pool.page_allocator import PageAllocator, RowPages
from lamina.cache.pool.page_table import page_columns
from tests.laws.toys import Toy


def test_the_places_of_positions_are_those_of_their_slots() -> None:
    for layout in (Layout(), Layout(ring=7), Layout(ring=5, keep=3), Layout(ring=1)):
        for page in (1, 2, 3, 5):
            for first in range(24):
                for end in range(first, first + 16):
                    slots = layout.slots(torch.arange(first, end))
                    assert page_columns(layout, page, first, end).tolist() == sorted({int(s) // page for s in slots})


def test_a_wrong_book_is_noticed() -> None:
    def book() -> PageAllocator:
        pages = PageAllocator()
        pages.add(4)
        held = RowPages(np.zeros((1, 3), dtype=np.int32))
        pages.enter(held)
        pages.give(held, pages.missing(held, [(0, np.arange(2))]))
        pages.check()
        return pages

    for wrong in (
        lambda pages: pages.free.append(pages.free[0]),
        lambda pages: pages.free.pop(),
        lambda pages: pages.refs.__setitem__(1, 2),
        lambda pages: next(iter(pages.tables)).numbers.__setitem__((0, 2), 1),
        lambda pages: next(iter(pages.tables)).numbers.__setitem__((0, 0), 9),
    ):
        pages = book()
        wrong(pages)
        with pytest.raises(AssertionError):
            pages.check()


class Notes(nn.Module):
    """Keeps one number a token in a line and in two rings; nothing is computed."""

    specs = {"line": Tokens(1), "ring": Tokens(1, Sliding(5)), "kept": Tokens(1, Sliding(4, keep=2))}


class Ledger:
    """A cache of `Notes` beside plain lists of numbers."""

    def __init__(self, cache: Cache, rows: list[list[float]]) -> None:
        self.cache, self.rows = cache, rows

    def append(self, rng: random.Random) -> None:
        chosen = rng.sample(range(len(self.rows)), rng.randint(1, len(self.rows)))
        T = rng.choice([1, 1, 2, 4, 7])
        new = torch.rand(len(chosen), T, 1, dtype=torch.float64)
        step = self.cache.step(T, rows=chosen)
        for name, layer in self.cache.layers[0].items():
            assert isinstance(layer, TokenLayer)
            layer.extend(step, (0, name), {"x": new})
        taken = [T if T == 1 else rng.randint(0, T) for _ in chosen]
        step.commit(taken)
        for row, n, numbers in zip(chosen, taken, new[..., 0].tolist(), strict=True):
            self.rows[row] = self.rows[row] + numbers[:n]

    def rewind(self, rng: random.Random) -> None:
        back = [rng.randint(0, most) for most in self.cache.rewindable.tolist()]
        self.cache.rewind(back)
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, back, strict=True)]

    def reset(self, rng: random.Random) -> None:
        gone = rng.sample(range(len(self.rows)), rng.randint(1, len(self.rows)))
        self.cache.reset(gone)
        self.rows = [[] if r in gone else row for r, row in enumerate(self.rows)]

    def reorder(self, rng: random.Random) -> None:
        rows = rng.choices(range(len(self.rows)), k=len(self.rows))
        self.cache.reorder(rows)
        self.rows = [self.rows[row] for row in rows]

    def select(self, rng: random.Random) -> Ledger:
        rows = rng.choices(range(len(self.rows)), k=rng.randint(1, 3))
        return Ledger(self.cache.select(rows), [self.rows[row] for row in rows])

    def fork(self, rng: random.Random) -> Ledger:
        return Ledger(self.cache.fork(), list(self.rows))

    def check(self) -> None:
        every = torch.arange(len(self.rows))
        assert self.cache.lengths.tolist() == [len(row) for row in self.rows]
        for layer in self.cache.layers[0].values():
            assert isinstance(layer, TokenLayer)
            held, ring, keep = layer.copied(every).data["x"][..., 0].tolist(), layer.layout.ring, layer.layout.keep
            for row, numbers in zip(held, self.rows, strict=True):
                if ring is None:
                    assert row[: len(numbers)] == numbers
                    continue
                assert row[: min(keep, len(numbers))] == numbers[:keep]
                for at in range(max(keep, len(numbers) + 1 - layer.window.span), len(numbers)):  # type: ignore[operator]
                    assert row[keep + (at - keep) % ring] == numbers[at]


OPERATIONS = ["append"] * 6 + ["rewind", "rewind", "reorder", "select", "fork", "fork", "reset", "drop", "release"]


def test_ten_thousand_random_operations_leak_nothing_and_keep_every_number() -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    model = Toy(Notes())
    pool = Pool(model, tokens=72, page=3, slack=2)
    ledgers: list[Ledger] = []
    ran_out = 0
    for i in range(10_000):
        if not ledgers:
            rows = rng.randint(1, 3)
            ledgers.append(Ledger(model.new_cache(rows, pool=pool), [[] for _ in range(rows)]))
        ledger = rng.choice(ledgers)
        operation = rng.choice(OPERATIONS)
        try:
            if operation in ("select", "fork"):
                ledgers.append(getattr(ledger, operation)(rng))
            elif operation in ("drop", "release"):
                ledgers.remove(ledger)
                if operation == "release":
                    ledger.cache.release()
            else:
                getattr(ledger, operation)(rng)
        except PagesError:
            ran_out += 1
            ledger.check()
            ledgers.remove(rng.choice(ledgers))
        if len(ledgers) > 6:
            ledgers.remove(rng.choice(ledgers))
        pool.check()
        if ledger in ledgers:
            ledger.check()
        if i % 100 == 0:
            for one in ledgers:
                one.check()
    assert ran_out > 20
    del ledger, one
    ledgers.clear()
    assert pool.check().used == 0
