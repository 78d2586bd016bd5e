"""Reference counts of pages, and the list of free ones. Host memory alone; no tensor is touched here.

Each cache has a table [B, width] of page numbers, with 0 where a row has no page: page 0 belongs to nobody and is never
written. A page that several rows refer to is shared and read-only; a row that wants to write gets a copy first.

    table of one cache    3 1 4 0            refs   page 1  2
    table of its fork     3 1 5 0                   page 3  2
                                                    page 4  1      each goes on in a page of its own
                                                    page 5  1

A cache may be garbage collected in any thread, in the middle of any operation here. So a dropped table is only put on a
list (`dropped`), and the next `settle` takes its pages back.

The tables are the truth; reference counts and the free list follow from them. Every method sets `unsure` while it
changes the counts. If an interrupt (Ctrl-C) cuts it short, the next method counts again from the tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PageNumbers = NDArray[np.int32]


class RowPages:
    """The page numbers [B, width] of one cache's rows, 0 where there is no page."""

    def __init__(self, numbers: PageNumbers) -> None:
        self.numbers = numbers


class MissingPage(NamedTuple):
    """A row needs a page of its own in column `at` of its table; `page` is the shared page that is there, or 0."""

    row: int
    at: int
    page: int


class PageAllocator:
    """The pages of one layer group. Callers hold the pool's lock."""

    def __init__(self) -> None:
        self.refs: PageNumbers = np.zeros(1, dtype=np.int32)  # [1 + pages]
        self.free: list[int] = []  # the last one is given out next
        self.tables: set[RowPages] = set()
        self.dropped: deque[RowPages] = deque()
        self.unsure = False  # refs and free may differ from the tables

    @property
    def count(self) -> int:
        """Number of pages, without page 0."""
        return len(self.refs) - 1

    def add(self, more: int) -> None:
        """Adds this many free pages."""
        self._begin()
        first = len(self.refs)
        self.refs = np.concatenate([self.refs, np.zeros(more, dtype=np.int32)])
        self.free[:0] = range(first + more - 1, first - 1, -1)
        self.unsure = False

    def settle(self) -> None:
        """Makes the counts right after an interrupt, and takes back the pages of dropped tables."""
        if self.unsure:
            self._recount()
        while self.dropped:
            self.release(self.dropped[0])
            self.dropped.popleft()

    def _begin(self) -> None:
        """Marks the counts as about to change; makes them right first."""
        if self.unsure:
            self._recount()
        self.unsure = True

    def _recount(self) -> None:
        refs = np.zeros_like(self.refs)
        for table in self.tables:
            np.add.at(refs, table.numbers[table.numbers > 0], 1)
        self.refs = refs
        self.free = ((refs[1:] == 0).nonzero()[0] + 1)[::-1].tolist()
        self.unsure = False

    # -- tables ----------------------------------------------------------------------------------------------------

    def enter(self, table: RowPages) -> None:
        """Counts the pages of a new table."""
        self._begin()
        self.tables.add(table)
        self._add_refs(table.numbers)
        self.unsure = False

    def put(self, table: RowPages, rows: Sequence[int], numbers: PageNumbers) -> None:
        """Replaces the pages of these rows by numbers [R, width], shared with the rows that have them already."""
        old = table.numbers[list(rows)]
        self._begin()
        self._add_refs(numbers)
        table.numbers[list(rows)] = numbers
        self._drop_refs(old)
        self.unsure = False

    def widen(self, table: RowPages, width: int) -> None:
        table.numbers = np.pad(table.numbers, ((0, 0), (0, width - table.numbers.shape[1])))

    def release(self, table: RowPages) -> None:
        """Gives back all pages of a table. A second call does nothing."""
        if table in self.tables:
            self._begin()
            self.tables.remove(table)
            self._drop_refs(table.numbers)
            self.unsure = False

    # -- before a pass ---------------------------------------------------------------------------------------------

    def missing(self, table: RowPages, wanted: Iterable[tuple[int, NDArray[np.intp]]]) -> list[MissingPage]:
        """The pages to allocate or copy before rows may write at (row, columns [N]) of their table."""
        found: list[MissingPage] = []
        given_up: dict[int, int] = {}
        for row, columns in wanted:
            pages = table.numbers[row, columns]
            for i in (self.refs[pages] != 1).nonzero()[0].tolist():
                page = int(pages[i])
                if page:
                    left = int(self.refs[page]) - given_up.get(page, 0)
                    if left == 1:
                        continue  # every other row that refers to it gets a copy
                    given_up[page] = given_up.get(page, 0) + 1
                found.append(MissingPage(row, int(columns[i]), page))
        return found

    def next_free(self, count: int) -> list[int]:
        """The pages that `give` takes for this many missing ones."""
        return self.free[: -count - 1 : -1] if count else []

    def give(self, table: RowPages, missing: Sequence[MissingPage]) -> None:
        """Puts a free page in each place; there must be enough."""
        self._begin()
        for (row, at, old), page in zip(missing, self.next_free(len(missing)), strict=True):
            table.numbers[row, at] = page
            self.refs[page] = 1
            if old:
                self.refs[old] -= 1
        del self.free[len(self.free) - len(missing) :]
        self.unsure = False

    def gained_without(self, tables: Sequence[PageNumbers], missing: Sequence[MissingPage]) -> set[int]:
        """Pages that only these tables and the rows with missing pages refer to. If the tables are dropped, such a page
        becomes free or needs no copy: either way one page is gained."""
        found = np.zeros_like(self.refs)
        for numbers in tables:
            np.add.at(found, numbers[numbers > 0], 1)
        held = found > 0
        np.add.at(found, [one.page for one in missing if one.page], 1)
        return set(np.flatnonzero(held & (found == self.refs)).tolist())

    # -- integrity -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless every page is free, or has exactly as many references as the tables hold."""
        found = np.zeros_like(self.refs)
        for table in self.tables:
            assert table.numbers.min(initial=0) >= 0 and table.numbers.max(initial=0) < len(found), "no such page"
            np.add.at(found, table.numbers[table.numbers > 0], 1)
        assert (found == self.refs).all(), f"pages {(found != self.refs).nonzero()[0].tolist()} are counted wrongly"
        free = set(self.free)
        assert len(free) == len(self.free), "a page is free twice"
        unused = set((self.refs[1:] == 0).nonzero()[0] + 1)
        assert free == unused, f"pages {sorted(free ^ unused)} are both free and used, or neither"

    def _add_refs(self, numbers: PageNumbers) -> None:
        np.add.at(self.refs, numbers[numbers > 0], 1)

    def _drop_refs(self, numbers: PageNumbers) -> None:
        pages = numbers[numbers > 0]
        np.subtract.at(self.refs, pages, 1)
        gone = np.unique(pages[self.refs[pages] == 0])
        self.free.extend(gone[::-1].tolist())
