"""What a cache holds of a pool: a table of pages for each kind of layer.

Selecting rows, forking, repeating, joining, splitting and reordering are about tables alone: pages are shared. Before a
pass the host gives out a page for every slot that the pass may write, and where such a page is shared, a copy
(`prepare`). So a pass itself never asks for a page, and one that finds none raises before anything was written.

On the device a table is [B, width] in int32, in memory of its own that stays where it is until rows need more places.
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
from lamina.cache.pool.page_allocator import Missing, Numbers, RowPages
from lamina.cache.storage.paged import PagedStorage

if TYPE_CHECKING:
    from lamina.cache.ops.reorder import Moves
    from lamina.cache.pool.pool import Kind, Pool

Span = tuple[int, int, int]
"""Of a row, the positions that may be written: (row, first, end)"""


def places_of(layout: Layout, page: int, first: int, end: int) -> NDArray[np.intp]:
    """The places in a row's table of the slots that positions first … end - 1 take.

    >>> places_of(Layout(ring=8), page=2, first=7, end=9)
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
    """The pages of one kind in one cache, on the host and on the device. Dropped, it gives them back."""

    def __init__(self, kind: Kind, numbers: Numbers, slots: int) -> None:
        self.kind, self.slots = kind, slots
        self.held = RowPages(numbers)
        weakref.finalize(self, kind.pages.dropped.append, self.held).atexit = False  # before a page is counted as ours
        kind.pages.enter(self.held)
        self._stale = True  # the device's copy differs from the host's
        self._tensor = allocate(numbers.shape, torch.int32, kind.parts[0].device)
        self._upload()

    @property
    def numbers(self) -> Numbers:
        return self.held.numbers

    @property
    def tensor(self) -> Tensor:
        """The numbers on the device."""
        if self._stale:
            self._upload()
        return self._tensor

    @property
    def pages(self) -> NDArray[np.int32]:
        """Every page that some row has, once."""
        return np.unique(self.numbers[self.numbers > 0])

    def widen(self, slots: int) -> None:
        """Places for so many slots, or a few more: none of a page is left out."""
        width, most = -(-slots // self.kind.page), self.kind.layout.most
        if width > self.numbers.shape[1]:
            self._stale = True
            self.kind.pages.widen(self.held, width)
            self._upload()
        self.slots = width * self.kind.page if most is None else min(width * self.kind.page, most)

    def missing(self, spans: Iterable[Span]) -> list[Missing]:
        self.kind.pages.settle()
        layout, page = self.kind.layout, self.kind.page
        return self.kind.pages.missing(
            self.held, [(row, places_of(layout, page, first, end)) for row, first, end in spans]
        )

    def give(self, missing: Sequence[Missing]) -> None:
        """Gives out pages, copied where they were shared. There must be enough."""
        if not missing:
            return
        new = self.kind.pages.next_free(len(missing))
        shared = [(one.page, page) for one, page in zip(missing, new, strict=True) if one.page]
        if shared:  # first of all: should there be no memory for it, nothing has changed
            self.kind.copy([old for old, _ in shared], [page for _, page in shared])
        tensor = self.tensor
        self._stale = True
        self.kind.pages.give(self.held, missing)
        rows, at, pages = on_device(
            [*(one.row for one in missing), *(one.at for one in missing), *new], tensor.device
        ).split(len(new))
        tensor[rows, at] = pages.to(torch.int32)
        self._stale = False

    def put(self, rows: Sequence[int], numbers: Numbers) -> None:
        """Gives rows other pages, [R, width] or narrower, shared with whoever has them."""
        if numbers.shape[1] < self.numbers.shape[1]:
            numbers = np.pad(numbers, ((0, 0), (0, self.numbers.shape[1] - numbers.shape[1])))
        self._stale = True
        self.kind.pages.put(self.held, rows, numbers)
        self._upload()

    def shrink(self, lengths: Sequence[int]) -> None:
        """Gives back pages past these lengths. A row that is longer than a ring needs all of its pages."""
        slots = np.arange(self.numbers.shape[1]) * self.kind.page
        beyond = slots >= np.array(lengths)[:, None]
        rows = np.flatnonzero((beyond & (self.numbers > 0)).any(axis=1)).tolist()
        if rows:
            self.put(rows, np.where(beyond, 0, self.numbers)[rows])

    def _upload(self) -> None:
        device = self._tensor.device
        if self._tensor.shape != self.numbers.shape:
            self._tensor = allocate(self.numbers.shape, torch.int32, device)
        host = torch.from_numpy(self.numbers)
        # Pinned memory is a copy, and is not used again before the device has read it.
        self._tensor.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)
        self._stale = False


class PageTables:
    """What a cache holds of a pool: a table for each kind."""

    def __init__(self, pool: Pool, tables: Mapping[Layout, PageTable], capacity: int | None) -> None:
        self.pool, self.tables, self.capacity = pool, dict(tables), capacity

    @classmethod
    def new(cls, pool: Pool, rows: int, capacity: int | None) -> PageTables:
        tables = {}
        with pool.lock:
            for layout, kind in pool.kinds.items():
                slots = capacity or 0
                slots = slots if layout.most is None else min(slots, layout.most)
                tables[layout] = PageTable(kind, np.zeros((rows, -(-slots // pool.page)), dtype=np.int32), slots)
        return cls(pool, tables, capacity)

    def bind(self, layers: Sequence[Mapping[str, Layer]]) -> None:
        """Makes these layers keep their tokens here."""
        for i, entry in enumerate(layers):
            for name, layer in entry.items():
                if layer.pageable and layer.layout is not None:
                    table = self.tables[layer.layout]
                    layer.data, layer.storage = table.kind.data[i, name], PagedStorage(table)
                    layer.grows = self.capacity is None and table.slots != layer.layout.most

    # -- before a pass ---------------------------------------------------------------------------------------------

    def take(self, clock: Clock, rows: Sequence[int], counts: Counts | None, T: int) -> None:
        """Sees to pages for all that a pass of T tokens may write; where these are too many, for what it will write."""

        def spans() -> list[Span]:
            most = [T] * len(rows) if counts is None else counts.high
            return [(row, clock.low[row], clock.high[row] + n) for row, n in zip(rows, most, strict=True) if n]

        sure = clock.exact and (counts is None or counts.low == counts.high)
        if not sure and self.lack(spans()):
            clock.sync()
            if counts is not None:
                counts.read()
        self.prepare(spans())

    def take_rings(self, clock: Clock, rows: Sequence[int], most: Sequence[int]) -> None:
        """Again for rings, before they take in up to so many tokens of the rows: since the pass was opened, somebody
        may have shared the pages that it was given."""
        spans = [(row, clock.low[row], clock.high[row] + n) for row, n in zip(rows, most, strict=True) if n]
        self.prepare(spans, rings_alone=True)

    def lack(self, spans: Sequence[Span]) -> bool:
        """Whether there are fewer free pages than `prepare` would take, whatever the pool's keepers drop."""
        while True:
            with self.pool.lock:
                needed = {table.kind: table.missing(spans) for table in self.tables.values()}
                if not any(self.pool.lacks(kind, len(missing)) for kind, missing in needed.items()):
                    return False
            if self.pool.tokens is None or not self.pool.reclaim(needed):
                return True

    def prepare(self, spans: Sequence[Span], rings_alone: bool = False) -> None:
        """Gives rows pages of their own wherever they may write. Raises PagesError before anything is changed, once the
        pool's keepers have nothing to drop that would help."""
        drops, streams = self.pool.tokens is not None, self.pool.streams
        while True:
            with self.pool.lock:
                streams.note()
                found = [
                    (table, table.missing(spans))
                    for layout, table in self.tables.items()
                    if not rings_alone or layout.ring is not None
                ]
                if not drops or not any(self.pool.lacks(table.kind, len(missing)) for table, missing in found):
                    for table, missing in found:
                        self.pool.provide(table.kind, len(missing))
                    if any(missing for _, missing in found):
                        streams.wait_for_others()
                    for table, missing in found:
                        table.give(missing)
                    if any(one.page for _, missing in found for one in missing):
                        streams.hold_others()  # whose page it was may write it, once it is copied
                    return
            # The pool's lock is free here: see pool.py for the order of locks.
            drops = self.pool.reclaim({table.kind: missing for table, missing in found})

    # -- verbs -----------------------------------------------------------------------------------------------------

    def widen(self, slots: int) -> None:
        """Places for rows of so many slots, where a kind has as many."""
        for layout, table in self.tables.items():
            needed = slots if layout.most is None else min(slots, layout.most)
            if needed > table.slots:
                table.widen(needed)

    def select(self, rows: Sequence[int]) -> PageTables:
        with self.pool.lock:
            tables = {
                layout: PageTable(table.kind, table.numbers[list(rows)], table.slots)
                for layout, table in self.tables.items()
            }
        return PageTables(self.pool, tables, self.capacity)

    def shrink(self, lengths: Sequence[int]) -> None:
        """The rows hold so many tokens now: gives back what lies past them."""
        with self.pool.lock:
            for table in self.tables.values():
                table.shrink(lengths)

    def reset(self, rows: Sequence[int]) -> None:
        with self.pool.lock:
            for table in self.tables.values():
                table.put(rows, np.zeros((len(rows), 0), dtype=np.int32))

    def reorder(self, moves: Moves) -> None:
        """Rows take over others' pages, once for all layers, when the moves are carried out."""
        to, sources = [move.to for move in moves.moves], [move.source for move in moves.moves]

        def take_over(pages: Sequence[Numbers]) -> None:
            with self.pool.lock:
                for table, numbers in zip(self.tables.values(), pages, strict=True):
                    table.put(to, numbers)

        if to:
            moves.change.add(lambda: [table.numbers[sources] for table in self.tables.values()], take_over)

    @property
    def steady(self) -> AbstractContextManager[object]:
        """While it is entered, no page of the pool moves. A captured step, which gives addresses of pages
        to the device, enters it before `prepare` and leaves it when its launch is queued."""
        return self.pool.steady

    def release(self) -> None:
        with self.pool.lock:
            for table in self.tables.values():
                table.kind.pages.release(table.held)

    def adopt(self, first: int, other: PageTables) -> None:
        """Rows from `first` on become those of another cache of this pool, sharing its pages."""
        with self.pool.lock:
            for layout, table in self.tables.items():
                numbers = other.tables[layout].numbers
                used = int(np.flatnonzero((numbers > 0).any(axis=0)).max(initial=-1)) + 1
                if used > table.numbers.shape[1]:
                    table.widen(used * table.kind.page)
                table.put(range(first, first + len(numbers)), numbers[:, :used])

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the tables themselves."""
        return sum(table.tensor.nbytes for table in self.tables.values())

    def pages(self, row: int, length: int) -> dict[Kind, set[int]]:
        """The pages of a row's first tokens."""
        return {
            table.kind: {int(page) for page in table.numbers[row, : -(-length // table.kind.page)] if page}
            for table in self.tables.values()
        }

    @property
    def own_and_shared(self) -> tuple[int, int]:
        """Bytes of the pages that this cache alone holds, and of those that others hold too."""
        own = shared = 0
        with self.pool.lock:
            for table in self.tables.values():
                table.kind.pages.settle()
                pages, times = np.unique(table.numbers[table.numbers > 0], return_counts=True)
                alone = int((table.kind.pages.refs[pages] == times).sum())
                own += alone * table.kind.page_bytes
                shared += (len(pages) - alone) * table.kind.page_bytes
        return own, shared
