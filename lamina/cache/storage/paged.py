"""Storage in pages of a pool: slot s of row b is slot s % page of page table[b, s // page].

Reads gather the pages of a row into one tensor, in the shape that every storage returns. The page table
(`page_table.py`) is on the device too, so nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.clock import Clock, on_device
from lamina.cache.codec.formats import Fields, fill_value
from lamina.cache.layers.layout import Layout
from lamina.cache.storage.device import Storage

if TYPE_CHECKING:
    from lamina.cache.layers.tokens import TokenLayer
    from lamina.cache.ops.reorder import Moves
    from lamina.cache.pool.page_table import PageTable
    from lamina.cache.step import Step


def by_slot(store: Tensor) -> Tensor:
    """[P, *lead, page, D] -> [P, page, *lead, D], and [R, *lead, T, D] -> [R, T, *lead, D]; its own inverse"""
    return store if store.dim() == 3 else store.transpose(1, 2)


def gather_pages(store: Tensor, pages: Tensor) -> Tensor:
    """store [P, *lead, page, D], pages [R, N] -> [R, *lead, N · page, D]"""
    if store.dim() == 3:
        return store[pages].flatten(1, 2)
    found = store.transpose(0, 1).index_select(1, pages.flatten())  # [H, R · N, page, D]
    return found.unflatten(1, tuple(pages.shape)).flatten(2, 3).transpose(0, 1)


class PagedStorage(Storage):
    """Slots in pages of a pool. `data` belongs to the pool: part -> [P, *lead, page, width].

    end   slots of a row, where a layer is cut to fewer than the table has
    """

    paged = True

    def __init__(self, table: PageTable, end: int | None = None) -> None:
        self.table, self.end = table, end
        self.page = table.group.page

    def columns(self, data: Fields) -> dict[str, int]:
        pages = self.table.tensor
        return {"slots": self.page, "pages": pages.data_ptr(), "pages_per_row": pages.shape[1]}

    def slots(self, data: Fields) -> int:
        return self.table.slots if self.end is None else self.end

    def widen(self, data: Fields, slots: int) -> None:
        self.table.widen(slots)

    def cut(self, data: Fields, slots: int) -> Fields:
        return data

    def first(self, slots: int) -> PagedStorage:
        return PagedStorage(self.table, slots)

    def nbytes(self, data: Fields) -> int:
        return len(self.table.pages) * sum(store[0].nbytes for store in data.values())

    # -- a pass ----------------------------------------------------------------------------------------------------

    def read_run(self, data: Fields, step: Step, first: int, end: int) -> Fields:
        at = first // self.page
        pages = step.take(self.table.tensor)[:, at : -(-end // self.page)]
        start, stop = first - at * self.page, end - at * self.page
        with self.table.group.reading:
            return {name: gather_pages(store, pages)[..., start:stop, :] for name, store in data.items()}

    def write_run(self, data: Fields, step: Step, start: int, new: Fields) -> None:
        tokens = next(iter(new.values())).shape[-2]
        slots = torch.arange(start, start + tokens, device=self.table.tensor.device)
        self._write(data, step.take(self.table.tensor)[:, slots // self.page], slots % self.page, new)

    def read(self, data: Fields, rows: Tensor, slots: Tensor) -> Fields:
        pages = self.table.tensor[rows[:, None], slots // self.page]
        with self.table.group.reading:
            return {name: by_slot(by_slot(store)[pages, slots % self.page]) for name, store in data.items()}

    def write(self, data: Fields, rows: Tensor, slots: Tensor, new: Fields) -> None:
        self._write(data, self.table.tensor[rows[:, None], slots // self.page], slots % self.page, new)

    def _write(self, data: Fields, pages: Tensor, at: Tensor, new: Fields) -> None:
        """Writes new [R, *lead, T, D] into pages [R, T] at slots `at`, [T] or [R, T]."""
        tokens = {name: by_slot(new[name]).to(store.dtype) for name, store in data.items()}
        with self.table.group.steady:
            for name, store in data.items():
                by_slot(store)[pages, at] = tokens[name]

    def scatter(self, data: Fields, name: str, rows: Tensor, there: Tensor, new: Tensor) -> None:
        """Writes the slots of new [R, *lead, S, D] that are True in `there` [R, S] into a part of these rows."""
        row, slot = there.nonzero(as_tuple=True)
        pages, tokens = self.table.tensor[rows[row], slot // self.page], by_slot(new)[row, slot]
        with self.table.group.steady:
            by_slot(data[name])[pages, slot % self.page] = tokens.to(data[name].dtype)

    # -- verbs -----------------------------------------------------------------------------------------------------

    def fill(self, data: Fields, free: Tensor, value: float) -> None:
        """Fills free slots of pages that one row alone refers to, and free pages. Other rows may use the rest."""
        group = self.table.group
        with group.lock:  # pages that are free now must stay so until they are filled
            allocator = group.settled()
            own = torch.from_numpy(allocator.refs[self.table.numbers] == 1).to(free.device)
            own = own.repeat_interleave(self.page, dim=1)[:, : free.shape[1]]
            nobody = on_device([0, *allocator.free], free.device)
            row, slot = (free & own).nonzero(as_tuple=True)
            at = self.table.tensor[row, slot // self.page], slot % self.page
            for store in data.values():
                by_slot(store)[at] = fill_value(store, value)
                store.index_fill_(0, nobody, fill_value(store, value))

    def reorder(self, data: Fields, moves: Moves, layout: Layout) -> None:
        return  # rows share pages, in all layers at once: see `PageTables.reorder`

    def select(self, tensor: Tensor, index: Tensor) -> Tensor:
        return tensor  # the page table of the new cache has the rows

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
        with self.table.group.reading:
            return {name: gather_pages(store, pages)[..., :slots, :].clone() for name, store in data.items()}

    def part(self, data: Fields, name: str, shape: Sequence[int]) -> PagedPart:
        return PagedPart(self, data, name, shape)


class PagedPart:
    """The target of `copy_` for a part of all rows, as if it were one tensor [B, *lead, S, D]; slots without a page are
    left out."""

    def __init__(self, storage: PagedStorage, data: Fields, name: str, shape: Sequence[int]) -> None:
        self.storage, self.data, self.name = storage, data, name
        rows, *rest, slots, _ = storage.like(data)[name].shape
        self.shape = torch.Size((rows, *rest, min(shape[-2], slots), data[name].shape[-1]))

    def copy_(self, new: Tensor) -> None:
        table = self.storage.table
        device = table.tensor.device
        there = torch.from_numpy(table.numbers > 0).to(device)
        there = there.repeat_interleave(self.storage.page, dim=1)[:, : new.shape[-2]]
        rows = torch.arange(len(there), device=device)
        self.storage.scatter(self.data, self.name, rows, there, new.to(device))


def copy_into_pages(layer: TokenLayer, rows: Sequence[int], other: TokenLayer, clock: Clock) -> None:
    """Copies the tokens of an unpaged layer into these rows of a paged one, which have the pages for them."""
    assert isinstance(layer.storage, PagedStorage)
    if not other.slots or not layer.slots:
        return
    held = layer.layout.positions(layer.slots, clock.lengths)  # [R, S]
    source = other.layout.slots(held.clamp(min=0)).clamp(max=other.slots - 1)
    tokens = other.storage.read(other.data, torch.arange(len(held), device=held.device), source)
    index = on_device(list(rows), held.device)
    for name in layer.data:
        layer.storage.scatter(layer.data, name, index, held >= 0, tokens[name])
