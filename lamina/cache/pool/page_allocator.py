"""Bookkeeping of pages: which are free, and how many rows refer to each. No tensor is touched here.

Rows of a cache know their pages by number, in a table [B, width] with 0 where there is none: page 0 is nobody's, and is
never written. A page that several rows refer to is shared, and nobody writes it; whoever wants to gets a page of its
own first.

    table of one cache    3 1 4 0            refs   page 1  2
    table of its fork     3 1 5 0                   page 3  2
                                                    page 4  1      each goes on in a page of its own
                                                    page 5  1

A table that nobody holds any more is only put on a list, by whichever thread and in the middle of whatever (that is how
Python drops things); its pages are taken back by the next one who looks (`settle`).

What tables say is the truth; counts and the list of free pages follow from it. Every method marks the counts as unsure
while it changes them, so if an interrupt cuts it short, the next one who looks counts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int32]


class RowPages:
    """The pages of one cache's rows: numbers [B, width], 0 where there is none."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers


class Missing(NamedTuple):
    """A row needs a page of its own at this place of its table; `page` is what it shares there, 0 for nothing."""

    row: int
    at: int
    page: int


class Pages:
    """The pages of one kind of layer. Whoever calls holds the pool's lock."""

    def __init__(self) -> None:
        self.refs: Numbers = np.zeros(1, dtype=np.int32)
        self.free: list[int] = []  # the next one to be given out last
        self.held: set[RowPages] = set()
        self.dropped: deque[RowPages] = deque()
        self.unsure = False  # counts may differ from what tables say

    @property
    def count(self) -> int:
        """How many there are, page 0 apart."""
        return len(self.refs) - 1

    def add(self, more: int) -> None:
        self._begin()
        first = len(self.refs)
        self.refs = np.concatenate([self.refs, np.zeros(more, dtype=np.int32)])
        self.free[:0] = range(first + more - 1, first - 1, -1)
        self.unsure = False

    def settle(self) -> None:
        """Makes the counts right: after an interrupt, and for tables that are gone."""
        if self.unsure:
            self._recount()
        while self.dropped:
            self.release(self.dropped[0])
            self.dropped.popleft()

    def _begin(self) -> None:
        """Counts are about to change; they are right up to here."""
        if self.unsure:
            self._recount()
        self.unsure = True

    def _recount(self) -> None:
        refs = np.zeros_like(self.refs)
        for held in self.held:
            np.add.at(refs, held.numbers[held.numbers > 0], 1)
        self.refs = refs
        self.free = ((refs[1:] == 0).nonzero()[0] + 1)[::-1].tolist()
        self.unsure = False

    # -- tables ----------------------------------------------------------------------------------------------------

    def hold(self, numbers: Numbers) -> RowPages:
        """A table with these pages, shared with whoever has them already."""
        held = RowPages(numbers)
        self.enter(held)
        return held

    def enter(self, held: RowPages) -> None:
        """Counts the pages of a new table."""
        self._begin()
        self.held.add(held)
        self._refer(held.numbers)
        self.unsure = False

    def put(self, held: RowPages, rows: Sequence[int], numbers: Numbers) -> None:
        """Gives these rows other pages [R, width], shared with whoever has them already; theirs are given back."""
        old = held.numbers[list(rows)]
        self._begin()
        self._refer(numbers)
        held.numbers[list(rows)] = numbers
        self._unrefer(old)
        self.unsure = False

    def widen(self, held: RowPages, width: int) -> None:
        held.numbers = np.pad(held.numbers, ((0, 0), (0, width - held.numbers.shape[1])))

    def release(self, held: RowPages) -> None:
        """Gives back all of it. A second time does nothing."""
        if held in self.held:
            self._begin()
            self.held.remove(held)
            self._unrefer(held.numbers)
            self.unsure = False

    # -- before a pass ---------------------------------------------------------------------------------------------

    def missing(self, held: RowPages, wanted: Iterable[tuple[int, NDArray[np.intp]]]) -> list[Missing]:
        """What must be given before rows can write at these places of their tables. (row, places [N]) each."""
        found: list[Missing] = []
        given_up: dict[int, int] = {}
        for row, places in wanted:
            pages = held.numbers[row, places]
            for i in (self.refs[pages] != 1).nonzero()[0].tolist():
                page = int(pages[i])
                if page:
                    left = int(self.refs[page]) - given_up.get(page, 0)
                    if left == 1:
                        continue  # all others are going to have copies
                    given_up[page] = given_up.get(page, 0) + 1
                found.append(Missing(row, int(places[i]), page))
        return found

    def next_free(self, count: int) -> list[int]:
        """The pages that `give` gives for so many missing ones."""
        return self.free[: -count - 1 : -1] if count else []

    def give(self, held: RowPages, missing: Sequence[Missing]) -> None:
        """Gives a free page for each; there must be enough."""
        self._begin()
        for (row, at, old), page in zip(missing, self.next_free(len(missing)), strict=True):
            held.numbers[row, at] = page
            self.refs[page] = 1
            if old:
                self.refs[old] -= 1
        del self.free[len(self.free) - len(missing) :]
        self.unsure = False

    def gained_without(self, tables: Sequence[Numbers], missing: Sequence[Missing]) -> set[int]:
        """Pages that nobody refers to but these tables and the rows that miss pages. Without the tables such a page is
        free, or needs no copy: one page is gained either way."""
        found = np.zeros_like(self.refs)
        for numbers in tables:
            np.add.at(found, numbers[numbers > 0], 1)
        held = found > 0
        np.add.at(found, [one.page for one in missing if one.page], 1)
        return set(np.flatnonzero(held & (found == self.refs)).tolist())

    # -- truth -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every page is free, or referred to just as often as is written down."""
        found = np.zeros_like(self.refs)
        for held in self.held:
            assert held.numbers.min(initial=0) >= 0 and held.numbers.max(initial=0) < len(found), "no such page"
            np.add.at(found, held.numbers[held.numbers > 0], 1)
        assert (found == self.refs).all(), f"pages {(found != self.refs).nonzero()[0].tolist()} are counted wrongly"
        free = set(self.free)
        assert len(free) == len(self.free), "a page is free twice"
        unused = set((self.refs[1:] == 0).nonzero()[0] + 1)
        assert free == unused, f"pages {sorted(free ^ unused)} are both free and used, or neither"

    def _refer(self, numbers: Numbers) -> None:
        np.add.at(self.refs, numbers[numbers > 0], 1)

    def _unrefer(self, numbers: Numbers) -> None:
        pages = numbers[numbers > 0]
        np.subtract.at(self.refs, pages, 1)
        gone = np.unique(pages[self.refs[pages] == 0])
        self.free.extend(gone[::-1].tolist())
