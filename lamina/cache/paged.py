"""A cache in pages of a pool: its tables, one for each kind of layer, and how slots are found through them.

Slot s of row b lies in page table[b, s // page] at s % page. Selecting rows, forking, repeating, joining, splitting and
reordering are about tables alone: pages are shared. Before a pass the host gives out a page for every slot that the
pass may write, and where such a page is shared, a copy (`prepare`). So a pass itself never asks for a page, and one
that finds none raises before anything was written.

On the device a table is [B, width] in int32, in memory of its own that stays where it is until rows need more places.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.cache.clock import Clock, allocate, on_device
from lamina.cache.codec import unused
from lamina.cache.formats import Fields
from lamina.cache.layer import Layer
from lamina.cache.layout import Layout
from lamina.cache.pages import Missing, Numbers
from lamina.cache.place import Place
from lamina.cache.store import TokenLayer

if TYPE_CHECKING:
    from lamina.cache.pool import Kind, Pool
    from lamina.cache.reordering import Move, Moves
    from lamina.cache.step import Step

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


class Table:
    """The pages of one kind in one cache, on the host and on the device. Dropped, it gives them back."""

    def __init__(self, kind: Kind, numbers: Numbers, slots: int) -> None:
        self.kind, self.slots = kind, slots
        self.tensor = allocate(numbers.shape, torch.int32, kind.parts[0].device)
        self.held = kind.pages.hold(numbers)
        weakref.finalize(self, kind.pages.dropped.append, self.held).atexit = False
        self._upload()

    @property
    def numbers(self) -> Numbers:
        return self.held.numbers

    @property
    def pages(self) -> NDArray[np.int32]:
        """Every page that some row has, once."""
        return np.unique(self.numbers[self.numbers > 0])

    def widen(self, slots: int) -> None:
        """Places for so many slots, or a few more: none of a page is left out."""
        width, most = -(-slots // self.kind.page), self.kind.layout.most
        self.slots = width * self.kind.page if most is None else min(width * self.kind.page, most)
        if width > self.numbers.shape[1]:
            self.kind.pages.widen(self.held, width)
            self._upload()

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
        self.kind.pages.give(self.held, missing)
        rows, at, pages = on_device(
            [*(one.row for one in missing), *(one.at for one in missing), *new], self.tensor.device
        ).split(len(new))
        self.tensor[rows, at] = pages.to(torch.int32)

    def put(self, rows: Sequence[int], numbers: Numbers) -> None:
        """Gives rows other pages, [R, width] or narrower, shared with whoever has them."""
        if numbers.shape[1] < self.numbers.shape[1]:
            numbers = np.pad(numbers, ((0, 0), (0, self.numbers.shape[1] - numbers.shape[1])))
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
        device = self.tensor.device
        if self.tensor.shape != self.numbers.shape:
            self.tensor = allocate(self.numbers.shape, torch.int32, device)
        host = torch.from_numpy(self.numbers)
        # Pinned memory is a copy, and is not used again before the device has read it.
        self.tensor.copy_(host.pin_memory() if device.type == "cuda" else host, non_blocking=True)


class Tables:
    """What a cache holds of a pool: a table for each kind."""

    def __init__(self, pool: Pool, tables: Mapping[Layout, Table], capacity: int | None) -> None:
        self.pool, self.tables, self.capacity = pool, dict(tables), capacity

    @classmethod
    def new(cls, pool: Pool, rows: int, capacity: int | None) -> Tables:
        tables = {}
        with pool.lock:
            for layout, kind in pool.kinds.items():
                slots = capacity or 0
                slots = slots if layout.most is None else min(slots, layout.most)
                tables[layout] = Table(kind, np.zeros((rows, -(-slots // pool.page)), dtype=np.int32), slots)
        return cls(pool, tables, capacity)

    def bind(self, layers: Sequence[Mapping[str, Layer]]) -> None:
        """Makes these layers keep their tokens here."""
        for i, entry in enumerate(layers):
            for name, layer in entry.items():
                if isinstance(layer, TokenLayer) and layer.pageable:
                    table = self.tables[layer.layout]
                    layer.data, layer.place = table.kind.data[i, name], PagedPlace(table)
                    layer.grows = self.capacity is None and table.slots != layer.layout.most

    # -- before a pass ---------------------------------------------------------------------------------------------

    def lack(self, spans: Sequence[Span]) -> bool:
        """Whether there are fewer free pages than `prepare` would take."""
        with self.pool.lock:
            return any(self.pool.lacks(table.kind, len(table.missing(spans))) for table in self.tables.values())

    def prepare(self, spans: Sequence[Span], rings_alone: bool = False) -> None:
        """Gives rows pages of their own wherever they may write. Raises PagesError before anything is changed."""
        with self.pool.lock:
            found = [
                (table, table.missing(spans))
                for layout, table in self.tables.items()
                if not rings_alone or layout.ring is not None
            ]
            for table, missing in found:
                self.pool.provide(table.kind, len(missing))
            for table, missing in found:
                table.give(missing)

    # -- verbs -----------------------------------------------------------------------------------------------------

    def widen(self, slots: int) -> None:
        """Places for rows of so many slots, where a kind has as many."""
        for layout, table in self.tables.items():
            needed = slots if layout.most is None else min(slots, layout.most)
            if needed > table.slots:
                table.widen(needed)

    def select(self, rows: Sequence[int]) -> Tables:
        with self.pool.lock:
            tables = {
                layout: Table(table.kind, table.numbers[list(rows)], table.slots)
                for layout, table in self.tables.items()
            }
        return Tables(self.pool, tables, self.capacity)

    def shrink(self, lengths: Sequence[int]) -> None:
        """The rows hold so many tokens now: gives back what lies past them."""
        with self.pool.lock:
            for table in self.tables.values():
                table.shrink(lengths)

    def reset(self, rows: Sequence[int]) -> None:
        with self.pool.lock:
            for table in self.tables.values():
                table.put(rows, np.zeros((len(rows), 0), dtype=np.int32))

    def reorder(self, moves: Sequence[Move]) -> None:
        with self.pool.lock:
            for table in self.tables.values() if moves else ():
                table.put([move.to for move in moves], table.numbers[[move.source for move in moves]])

    def release(self) -> None:
        with self.pool.lock:
            for table in self.tables.values():
                table.kind.pages.release(table.held)

    def adopt(self, first: int, other: Tables) -> None:
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


def copy_in(layer: TokenLayer, rows: Sequence[int], other: TokenLayer, clock: Clock) -> None:
    """Copies what another layer holds into these rows of a paged one, which have the pages for it."""
    assert isinstance(layer.place, PagedPlace)
    if not other.slots or not layer.slots:
        return
    held = layer.layout.positions(layer.slots, clock.lengths)  # [R, S]
    source = other.layout.slots(held.clamp(min=0)).clamp(max=other.slots - 1)
    numbers = other.place.read(other.data, torch.arange(len(held), device=held.device), source)
    index = on_device(list(rows), held.device)
    for name, store in layer.data.items():
        layer.place.put(store, index, held >= 0, numbers[name])


# -- slots through a table -----------------------------------------------------------------------------------------


def by_slot(store: Tensor) -> Tensor:
    """[P, *lead, page, D] or [R, *lead, T, D] with rows and slots in front."""
    return store if store.dim() == 3 else store.transpose(1, 2)


def side_by_side(store: Tensor, pages: Tensor) -> Tensor:
    """store [P, *lead, page, D], pages [R, N] -> [R, *lead, N · page, D]"""
    if store.dim() == 3:
        return store[pages].flatten(1, 2)
    found = store.transpose(0, 1).index_select(1, pages.flatten())  # [H, R · N, page, D]
    return found.unflatten(1, tuple(pages.shape)).flatten(2, 3).transpose(0, 1)


class PagedPlace(Place):
    """Slots that lie in pages of a pool. `data` is the pool's: name of a part -> [P, *lead, page, width]."""

    paged = True

    def __init__(self, table: Table, end: int | None = None) -> None:
        self.table, self.end = table, end
        self.page = table.kind.page

    def slots(self, data: Fields) -> int:
        return self.table.slots if self.end is None else self.end

    def widen(self, data: Fields, slots: int) -> None:
        self.table.widen(slots)

    def cut(self, data: Fields, slots: int) -> Fields:
        return data

    def first(self, slots: int) -> PagedPlace:
        return PagedPlace(self.table, slots)

    def nbytes(self, data: Fields) -> int:
        return len(self.table.pages) * sum(store[0].nbytes for store in data.values())

    # -- a pass ----------------------------------------------------------------------------------------------------

    def run(self, data: Fields, step: Step, first: int, end: int) -> Fields:
        at = first // self.page
        pages = step.take(self.table.tensor)[:, at : -(-end // self.page)]
        start, stop = first - at * self.page, end - at * self.page
        return {name: side_by_side(store, pages)[..., start:stop, :] for name, store in data.items()}

    def put_run(self, data: Fields, step: Step, start: int, new: Fields) -> None:
        tokens = next(iter(new.values())).shape[-2]
        slots = torch.arange(start, start + tokens, device=self.table.tensor.device)
        pages = step.take(self.table.tensor)[:, slots // self.page]
        for name, store in data.items():
            by_slot(store)[pages, slots % self.page] = by_slot(new[name]).to(store.dtype)

    def read(self, data: Fields, rows: Tensor, slots: Tensor) -> Fields:
        pages = self.table.tensor[rows[:, None], slots // self.page]
        return {name: by_slot(by_slot(store)[pages, slots % self.page]) for name, store in data.items()}

    def write(self, data: Fields, rows: Tensor, slots: Tensor, new: Fields) -> None:
        pages = self.table.tensor[rows[:, None], slots // self.page]
        for name, store in data.items():
            by_slot(store)[pages, slots % self.page] = by_slot(new[name]).to(store.dtype)

    def put(self, store: Tensor, rows: Tensor, there: Tensor, new: Tensor) -> None:
        """Writes the slots of these rows that are True in `there` [R, S]. new [R, *lead, S, D]"""
        row, slot = there.nonzero(as_tuple=True)
        pages = self.table.tensor[rows[row], slot // self.page]
        by_slot(store)[pages, slot % self.page] = by_slot(new)[row, slot].to(store.dtype)

    # -- verbs -----------------------------------------------------------------------------------------------------

    def fill(self, data: Fields, free: Tensor, value: float) -> None:
        """Where a page is shared, someone else may use what is free here."""
        pages = self.table.kind.pages
        own = torch.from_numpy(pages.refs[self.table.numbers] == 1).to(free.device)
        own = own.repeat_interleave(self.page, dim=1)[:, : free.shape[1]]
        nobody = on_device([0, *pages.free], free.device)
        row, slot = (free & own).nonzero(as_tuple=True)
        at = self.table.tensor[row, slot // self.page], slot % self.page
        for store in data.values():
            by_slot(store)[at] = unused(store, value)
            store.index_fill_(0, nobody, unused(store, value))

    def reorder(self, data: Fields, moves: Moves, layout: Layout) -> None:
        return  # rows take over others' pages, once for all layers: see `Tables.reorder`

    def select(self, data: Fields, index: Tensor) -> Fields:
        return data  # the new cache's tables say which rows these are

    # -- as plain tensors ------------------------------------------------------------------------------------------

    def like(self, data: Fields) -> Fields:
        rows, slots = len(self.table.numbers), self.slots(data)
        return {
            name: torch.empty((rows, *x.shape[1:-2], slots, x.shape[-1]), dtype=x.dtype, device="meta")
            for name, x in data.items()
        }

    def copied(self, data: Fields, index: Tensor) -> Fields:
        slots = self.slots(data)
        pages = self.table.tensor[index, : -(-slots // self.page)]
        return {name: side_by_side(store, pages)[..., :slots, :].clone() for name, store in data.items()}

    def part(self, data: Fields, name: str, shape: Sequence[int]) -> PagedPart:
        return PagedPart(self, data, name, shape)


class PagedPart:
    """A part of all rows, written as if it were one tensor [B, *lead, S, D]; slots without a page are left out."""

    def __init__(self, place: PagedPlace, data: Fields, name: str, shape: Sequence[int]) -> None:
        self.place, self.data, self.name = place, data, name
        rows, *rest, slots, _ = place.like(data)[name].shape
        self.shape = torch.Size((rows, *rest, min(shape[-2], slots), data[name].shape[-1]))

    def copy_(self, new: Tensor) -> None:
        store, table = self.data[self.name], self.place.table
        there = torch.from_numpy(table.numbers > 0).to(store.device)
        there = there.repeat_interleave(self.place.page, dim=1)[:, : new.shape[-2]]
        rows = torch.arange(len(there), device=store.device)
        self.place.put(store, rows, there, new.to(store.device, store.dtype))
