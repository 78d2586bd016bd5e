"""Where the numbers of a layer lie, and how they are read and written.

A layer thinks in rows, slots and positions; its place knows what memory these are. `Storage` is the plain one: each
part is a tensor [B, *lead, S, width] on the device, so keys [B, H, S, D] feed attention as they are, and flat parts [B,
S, width] need no head axis. Whatever the place, what is read comes in that shape. `host.py` has the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.clock import allocate
from lamina.cache.codec.codec import unused
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.layout import Layout

if TYPE_CHECKING:
    from lamina.cache.ops.reorder import Moves
    from lamina.cache.step import Step
    from lamina.cache.storage.paged import PagedPart


def read_slots(store: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """store [B, *lead, S, D], rows [R], slots [R, T] -> [R, *lead, T, D]"""
    if store.dim() == 3:
        return store[rows[:, None], slots]
    return store.transpose(1, 2)[rows[:, None], slots].transpose(1, 2)


def write_slots(store: Tensor, rows: Tensor, slots: Tensor, new: Tensor) -> None:
    """Writes new [R, *lead, T, D] into the slots [R, T] of the rows [R]."""
    new = new.to(store.dtype)
    if store.dim() == 3:
        store[rows[:, None], slots] = new
    else:
        store.transpose(1, 2)[rows[:, None], slots] = new.transpose(1, 2)


def owned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy that may be written outside `torch.inference_mode` too."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


class Storage:
    """On the device, every row with as many slots as the others. `data` is the layer's: name of a part -> tensor."""

    residence = "device"
    paged = False

    def columns(self) -> dict[str, int]:
        """What a kernel must know beside the tensors' addresses, by column (see `Layer.columns`)."""
        return {}

    def make(
        self, rows: int, lead: Sequence[int], slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return allocate((rows, *lead, slots, width), dtype, device)

    def make_state(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for what is not kept by token, rows in front."""
        return allocate(shape, dtype, device)

    def slots(self, data: Fields) -> int:
        """How many slots a row has."""
        return next(iter(data.values())).shape[-2]

    def widen(self, data: Fields, slots: int) -> None:
        """More slots, in all parts at once: the peak is one layer's copy, and no interrupt leaves parts that differ."""
        new: Fields = {}
        for name, old in data.items():
            new[name] = allocate((*old.shape[:-2], slots, old.shape[-1]), old.dtype, old.device)
            new[name][..., : old.shape[-2], :].copy_(old)
        data.update(new)

    def cut(self, data: Fields, slots: int) -> Fields:
        """The first slots of each row, sharing memory."""
        return {name: store[..., :slots, :] for name, store in data.items()}

    def first(self, slots: int) -> Storage:
        """The place of what `cut` gives."""
        return self

    def nbytes(self, data: Fields) -> int:
        return sum(store.nbytes for store in data.values())

    # -- a pass ----------------------------------------------------------------------------------------------------

    def take(self, step: Step, tensor: Tensor) -> Tensor:
        """The pass's rows of it."""
        return step.take(tensor)

    def put(self, step: Step, tensor: Tensor, new: Tensor) -> None:
        """Writes the pass's rows of it."""
        step.put(tensor, new)

    def rows(self, step: Step) -> Tensor:
        """[R] where the pass's rows are."""
        return step.row_index

    def run(self, data: Fields, step: Step, first: int, end: int) -> Fields:
        """Slots first … end - 1 of the pass's rows."""
        return {name: step.take(store)[..., first:end, :] for name, store in data.items()}

    def put_run(self, data: Fields, step: Step, start: int, new: Fields) -> None:
        """Writes into the slots from `start` on, the same in each of the pass's rows."""
        for name, store in data.items():
            numbers = new[name]
            step.take(store)[..., start : start + numbers.shape[-2], :].copy_(numbers)

    def read(self, data: Fields, rows: Tensor, slots: Tensor) -> Fields:
        """rows [R], slots [R, N] -> [R, *lead, N, width]"""
        return {name: read_slots(store, rows, slots) for name, store in data.items()}

    def write(self, data: Fields, rows: Tensor, slots: Tensor, new: Fields) -> None:
        for name, store in data.items():
            write_slots(store, rows, slots, new[name])

    # -- verbs -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for copies that are under way."""

    def near(self, tensor: Tensor) -> Tensor:
        """It, on the device."""
        return tensor

    def select(self, tensor: Tensor, index: Tensor) -> Tensor:
        """These rows of it, in memory of their own."""
        return owned(tensor.index_select(0, index))

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Their rows one after the other, in memory of their own."""
        return owned(torch.cat(list(tensors)))

    def fill(self, data: Fields, free: Tensor, value: float) -> None:
        """Fills the slots that are True in `free` [B, S]."""
        for store in data.values():
            store.masked_fill_(free.reshape(len(free), *(1,) * (store.dim() - 3), -1, 1), unused(store, value))

    def reorder(self, data: Fields, moves: Moves, layout: Layout) -> None:
        for store in data.values():
            moves.slots(store, layout)

    # -- as plain tensors ------------------------------------------------------------------------------------------

    def like(self, data: Fields) -> Fields:
        """Tensors in the shape of `copied` for all rows, whose numbers nobody looks at."""
        return data

    def copied(self, data: Fields, index: Tensor) -> Fields:
        """These rows in plain memory that nobody shares: [R, *lead, S, width] each."""
        return {name: self.select(store, index) for name, store in data.items()}

    def part(self, data: Fields, name: str, shape: Sequence[int]) -> Tensor | PagedPart:
        """Where a tensor of that shape, which `copied` gave elsewhere, is copied to."""
        return data[name][tuple(slice(size) for size in shape)]
