"""Page tables: which pages of a pool hold the tokens of a cache's rows, one table for each layer group.

Select, fork, repeat, join, split and reorder copy page numbers alone: pages are shared. Before a pass the host gives
every row a page for each slot that the pass may write, and a copy where that page is shared (`prepare`). So a pass
itself never allocates, and a pass for which there are too few pages raises before anything is written.

On the device a table is int32 [B, width]. Its memory stays in place until rows need more columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.cache.clock import Clock, allocate, on_device
from lamina.cache.counts import Counts
from lamina.cache.layers.base import Layer
from lamina.cache.layers.layout import Layout
from lamina.cache.pool.page_allocator import MissingPage, PageNumbers, RowPages
from lamina.cache.storage.paged import PagedStorage

if TYPE_CHECKING:
    from lamina.cache.ops.reorder import Moves
    from lamina.cache.pool.pool import LayerGroup, Pool

Span = tuple[int, int, int]
"""Positions of a row that may be written: (row, first, end)."""


def page_columns(layout: Layout, page: int, first: int, end: int) -> NDArray[np.intp]:
    """The columns of a row's page table that hold the slots of positions first … end - 1.

    >>> page_columns(Layout(ring=8), page=2, first=7, end=9)
    array([0, 3])
    """
    if end <= first:
        return np.arange(0)
    if layout.ring is None or layout.most is None or end <= layout.most:  # a slot is a position
        return np.arange(first // page, (end - 1) // page + 1)
    runs = [(first, layout.keep)] if first < layout.keep else []
    first = max(first, layout.keep)
    a, b = (layout.keep + (position - layout.keep) % layout.ring for position in (first, end - 1))
    if end - first >= layout.ring:
        runs.append((layout.keep, layout.most))
    else:
        runs += [(a, b + 1)] if a <= b else [(layout.keep, b + 1), (a, layout.most)]
    return np.unique(np.concatenate([np.arange(x // page, (y - 1) // page + 1) for x, y in runs]))


class PageTable:
    """The pages of one layer group in one cache, on the host and on the device. Dropping it gives the pages back."""

    def __init__(self, group: LayerGroup, numbers: PageNumbers, slots: int) -> None:
        self.group, self.slots = group, slots
        self.rows = RowPages(numbers)
        # Before `enter`: an interrupt in between must not leave pages that nobody gives back.
        weakref.finalize(self, group.allocator.dropped.append, self.rows).atexit = False
        group.allocator.enter(self.rows)
        self._stale = True  # the device's copy differs from the host's
        self._tensor = allocate(numbers.shape, torch.int32, group.parts[0].device)
        self._upload()

    @property
    def numbers(self) -> PageNumbers:
        """[B, width] on the host"""
        return self.rows.numbers

    @property
    def tensor(self) -> Tensor:
        """[B, width] on the device"""
        if self._stale:
            self._upload()
        return self._tensor

    @property
    def pages(self) -> NDArray[np.int32]:
        """The distinct pages of all rows."""
        return np.unique(self.numbers[self.numbers > 0])

    def widen(self, slots: int) -> None:
        """Makes columns for this many slots, rounded up to whole pages."""
        width, most = -(-slots // self.group.page), self.group.layout.most
        if width > self.numbers.shape[1]:
            self._stale = True
            self.group.allocator.widen(self.rows, width)
            self._upload()
        self.slots = width * self.group.page if most is None else min(width * self.group.page, most)

    def missing(self, spans: Iterable[Span]) -> list[MissingPage]:
        """The pages to allocate or copy before these positions may be written."""
        self.group.allocator.settle()
        layout, page = self.group.layout, self.group.page
        return self.group.allocator.missing(
            self.rows, [(row, page_columns(layout, page, first, end)) for row, first, end in spans]
        )

    def give(self, missing: Sequence[MissingPage]) -> None:
        """Gives out free pages, with the contents of the shared pages that they replace. There must be enough."""
        if not missing:
            return
        new = self.group.allocator.next_free(len(missing))
        shared = [(one.page, page) for one, page in zip(missing, new, strict=True) if one.page]
        if shared:  # first: if memory for the copy runs out, nothing has changed
            self.group.copy([old for old, _ in shared], [page for _, page in shared])
        tensor = self.tensor
        self._stale = True
        self.group.allocator.give(self.rows, missing)
        rows, at, pages = on_device(
            [*(one.row for one in missing), *(one.at for one in missing), *new], tensor.device
        ).split(len(new))
        tensor[rows, at] = pages.to(torch.int32)
        self._stale = False

    def put(self, rows: Sequence[int], numbers: PageNumbers) -> None:
        """Replaces the pages of these rows by numbers [R, up to width], shared with the rows that have them."""
        if numbers.shape[1] < self.numbers.shape[1]:
            numbers = np.pad(numbers, ((0, 0), (0, self.numbers.shape[1] - numbers.shape[1])))
        self._stale = True
        self.group.allocator.put(self.rows, rows, numbers)
        self._upload()

    def shrink(self, lengths: Sequence[int]) -> None:
        """Gives back the pages past these lengths. A row that is longer than its ring keeps all of its pages."""
        slots = np.arange(self.numbers.shape[1]) * self.group.page
        beyond = slots >= np.array(lengths)[:, None]
        rows = np.flatnonzero((beyond & (self.numbers > 0)).any(axis=1)).tolist()
        if rows:
            self.put(rows, np.where(beyond, 0, self.numbers)[rows])

    def _upload(self) -> None:
        device = self._tensor.device
        if self._tensor.shape != self.numbers.shape:
            self._tensor = allocate(self.numbers.shape, torch.int32, device)
        host = torch.from_numpy(self.numbers)
        # The pinned copy is not reused before the device has read it.
        self._tensor.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)
        self._stale = False


class PageTables:
    """The page tables of one cache, one for each layer group of its pool."""

    def __init__(self, pool: Pool, tables: Mapping[Layout, PageTable], capacity: int | None) -> None:
        self.pool, self.tables, self.capacity = pool, dict(tables), capacity

    @classmethod
    def new(cls, pool: Pool, rows: int, capacity: int | None) -> PageTables:
        """Tables of rows without pages; columns for `capacity` tokens, or columns that grow if it is None."""
        tables = {}
        with pool.lock:
            for layout, group in pool.groups.items():
                slots = capacity or 0
                slots = slots if layout.most is None else min(slots, layout.most)
                tables[layout] = PageTable(group, np.zeros((rows, -(-slots // pool.page)), dtype=np.int32), slots)
        return cls(pool, tables, capacity)

    def bind(self, layers: Sequence[Mapping[str, Layer]]) -> None:
        """Makes these layers store their tokens in these pages."""
        for i, entry in enumerate(layers):
            for name, layer in entry.items():
                if layer.pageable and layer.layout is not None:
                    table = self.tables[layer.layout]
                    layer.data, layer.storage = table.group.data[i, name], PagedStorage(table)
                    layer.grows = self.capacity is None and table.slots != layer.layout.most

    # -- before a pass ---------------------------------------------------------------------------------------------

    def prepare_pass(self, clock: Clock, rows: Sequence[int], counts: Counts | None, T: int) -> None:
        """Gives these rows pages for all that a pass of T tokens may write.

        The host may know lengths and counts as upper bounds only. If there are too few pages for the bounds, it reads
        the exact values from the device.
        """

        def spans() -> list[Span]:
            most = [T] * len(rows) if counts is None else counts.high
            return [(row, clock.low[row], clock.high[row] + n) for row, n in zip(rows, most, strict=True) if n]

        sure = clock.exact and (counts is None or counts.low == counts.high)
        if not sure and self.runs_short(spans()):
            clock.sync()
            if counts is not None:
                counts.read()
        self.prepare(spans())

    def prepare_rings(self, clock: Clock, rows: Sequence[int], most: Sequence[int]) -> None:
        """Gives rows pages for up to most[i] tokens that rings store at commit.

        Rings need this a second time: a fork made since the pass was opened may share the pages that it was given.
        """
        spans = [(row, clock.low[row], clock.high[row] + n) for row, n in zip(rows, most, strict=True) if n]
        self.prepare(spans, rings_alone=True)

    def runs_short(self, spans: Sequence[Span]) -> bool:
        """True if `prepare` would find too few free pages, even after prefix stores drop what they can."""
        while True:
            with self.pool.lock:
                needed = {table.group: table.missing(spans) for table in self.tables.values()}
                if not any(group.lacks(len(missing)) for group, missing in needed.items()):
                    return False
            if self.pool.tokens is None or not self.pool.reclaim(needed):
                return True

    def prepare(self, spans: Sequence[Span], rings_alone: bool = False) -> None:
        """Gives rows pages of their own for these positions, of rings alone if asked. Raises PagesError before anything
        is changed, after prefix stores have dropped what helps."""
        drops, streams = self.pool.tokens is not None, self.pool.streams
        while True:
            with self.pool.lock:
                streams.add_current()
                found = [
                    (table, table.missing(spans))
                    for layout, table in self.tables.items()
                    if not rings_alone or layout.ring is not None
                ]
                if not drops or not any(table.group.lacks(len(missing)) for table, missing in found):
                    for table, missing in found:
                        self.pool._provide(table.group, len(missing))
                    if any(missing for _, missing in found):
                        streams.wait_for_others()
                    for table, missing in found:
                        table.give(missing)
                    if any(one.page for _, missing in found for one in missing):
                        streams.hold_others()  # a row that kept a shared page may write it only after the copy
                    return
            # The pool's lock is not held here: see pool.py for the order of locks.
            drops = self.pool.reclaim({table.group: missing for table, missing in found})

    # -- verbs -----------------------------------------------------------------------------------------------------

    def widen(self, slots: int) -> None:
        """Makes columns for rows of this many slots; a ring has no more than its size."""
        for layout, table in self.tables.items():
            needed = slots if layout.most is None else min(slots, layout.most)
            if needed > table.slots:
                table.widen(needed)

    def select(self, rows: Sequence[int]) -> PageTables:
        """Tables of a new cache with these rows, sharing their pages."""
        with self.pool.lock:
            tables = {
                layout: PageTable(table.group, table.numbers[list(rows)], table.slots)
                for layout, table in self.tables.items()
            }
        return PageTables(self.pool, tables, self.capacity)

    def shrink(self, lengths: Sequence[int]) -> None:
        """Gives back the pages past these lengths of the rows."""
        with self.pool.lock:
            for table in self.tables.values():
                table.shrink(lengths)

    def reset(self, rows: Sequence[int]) -> None:
        """Gives back all pages of these rows."""
        with self.pool.lock:
            for table in self.tables.values():
                table.put(rows, np.zeros((len(rows), 0), dtype=np.int32))

    def reorder(self, moves: Moves) -> None:
        """Adds to the change that `moves` carries out: rows share the pages of their sources, in all layers at once."""
        to, sources = [move.to for move in moves.moves], [move.source for move in moves.moves]

        def put(pages: Sequence[PageNumbers]) -> None:
            with self.pool.lock:
                for table, numbers in zip(self.tables.values(), pages, strict=True):
                    table.put(to, numbers)

        if to:
            moves.change.add(lambda: [table.numbers[sources] for table in self.tables.values()], put)

    @property
    def steady(self) -> AbstractContextManager[object]:
        """A context in which no page moves to other memory. A captured step, which gives addresses of pages to the
        device, enters it before `prepare` and leaves it when its launch is queued."""
        return self.pool.steady

    def release(self) -> None:
        """Gives back all pages."""
        with self.pool.lock:
            for table in self.tables.values():
                table.group.allocator.release(table.rows)

    def adopt(self, first: int, other: PageTables) -> None:
        """Rows from `first` on share the pages of the rows of another cache of this pool."""
        with self.pool.lock:
            for layout, table in self.tables.items():
                numbers = other.tables[layout].numbers
                used = int(np.flatnonzero((numbers > 0).any(axis=0)).max(initial=-1)) + 1
                if used > table.numbers.shape[1]:
                    table.widen(used * table.group.page)
                table.put(range(first, first + len(numbers)), numbers[:, :used])

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the tables themselves."""
        return sum(table.tensor.nbytes for table in self.tables.values())

    def pages(self, row: int, length: int) -> dict[LayerGroup, set[int]]:
        """The pages of a row's first `length` tokens."""
        return {
            table.group: {int(page) for page in table.numbers[row, : -(-length // table.group.page)] if page}
            for table in self.tables.values()
        }

    @property
    def own_and_shared(self) -> tuple[int, int]:
        """Bytes of the pages that only this cache refers to, and of those that others refer to as well."""
        own = shared = 0
        with self.pool.lock:
            for table in self.tables.values():
                table.group.allocator.settle()
                pages, times = np.unique(table.numbers[table.numbers > 0], return_counts=True)
                alone = int((table.group.allocator.refs[pages] == times).sum())
                own += alone * table.group.page_bytes
                shared += (len(pages) - alone) * table.group.page_bytes
        return own, shared
