"""Storage: reads and writes the tensors of a layer by row and slot.

A layer works with rows, slots and positions; its storage knows which memory they are in. `Storage` is the plain one:
each part is a tensor [B, *lead, S, width] on the device, where *lead is the heads axis or nothing. So keys [B, H, S, D]
go to attention without a copy. `HostStorage` (host.py), `StagedStorage` (prefetch.py) and `PagedStorage` (paged.py)
return the same shapes from other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.clock import allocate
from lamina.cache.codec.formats import Fields, fill_value
from lamina.cache.layers.layout import Layout
from lamina.tracing import cast

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
    new = cast(new, store.dtype)
    at = rows[:, None], slots
    if store.dim() == 3:  # an assignment to `store[at]` would not be traced for one row of any number of tokens
        store.index_put_(at, new)
    else:
        store.transpose(1, 2).index_put_(at, new.transpose(1, 2))


def owned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy if it was made in `torch.inference_mode`, which forbids writing it outside."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


class Storage:
    """On the device, with the same number of slots for every row. `data` is `Layer.data`: part -> tensor."""

    residence = "device"
    paged = False

    def columns(self, data: Fields) -> dict[str, int]:
        """What a kernel must know beside the tensors' addresses, by column (see `Layer.columns`)."""
        return {"slots": next(iter(data.values())).shape[-2]}

    def make(
        self, rows: int, lead: Sequence[int], slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A new part [rows, *lead, slots, width] of zeros."""
        return allocate((rows, *lead, slots, width), dtype, device)

    def make_state(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, later: bool = False) -> Tensor:
        """A new state [rows, …] of zeros: what is not stored by token. later: as in `allocate`"""
        return allocate(shape, dtype, device, later=later)

    def slots(self, data: Fields) -> int:
        """Slots of a row."""
        return next(iter(data.values())).shape[-2]

    def widen(self, data: Fields, slots: int) -> None:
        """Grows to this many slots, all parts at once: an interrupt cannot leave parts of different sizes."""
        new: Fields = {}
        for name, old in data.items():
            shape, copies = (*old.shape[:-2], slots, old.shape[-1]), old.numel() > 0
            new[name] = allocate(shape, old.dtype, old.device, later=not copies)
            if copies:
                new[name][..., : old.shape[-2], :].copy_(old)
        data.update(new)

    def cut(self, data: Fields, slots: int) -> Fields:
        """The first slots of each row, as views."""
        return {name: store[..., :slots, :] for name, store in data.items()}

    def first(self, slots: int) -> Storage:
        """The storage of what `cut` returns."""
        return self

    def nbytes(self, data: Fields) -> int:
        return sum(store.nbytes for store in data.values())

    # -- a pass ----------------------------------------------------------------------------------------------------

    def take(self, step: Step, tensor: Tensor) -> Tensor:
        """The rows of the pass."""
        return step.take(tensor)

    def put(self, step: Step, tensor: Tensor, new: Tensor) -> None:
        """Writes the rows of the pass."""
        step.put(tensor, new)

    def rows(self, step: Step) -> Tensor:
        """[R] row numbers of the pass in these tensors."""
        return step.row_index

    def read_run(self, data: Fields, step: Step, first: int, end: int) -> Fields:
        """Slots first … end - 1 of the rows of the pass: [R, *lead, end - first, width] each."""
        return {name: step.take(store)[..., first:end, :] for name, store in data.items()}

    def write_run(self, data: Fields, step: Step, start: int, new: Fields) -> None:
        """Writes new [R, *lead, T, width] into slots start … start + T - 1 of the rows of the pass."""
        for name, store in data.items():
            tokens = new[name]
            step.take(store)[..., start : start + tokens.shape[-2], :].copy_(tokens)

    def read(self, data: Fields, rows: Tensor, slots: Tensor) -> Fields:
        """rows [R], slots [R, N] -> [R, *lead, N, width]"""
        return {name: read_slots(store, rows, slots) for name, store in data.items()}

    def write(self, data: Fields, rows: Tensor, slots: Tensor, new: Fields) -> None:
        """Writes new [R, *lead, N, width] into slots [R, N] of rows [R]."""
        for name, store in data.items():
            write_slots(store, rows, slots, new[name])

    # -- verbs -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for copies between host and device."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        return tensor

    def select(self, tensor: Tensor, index: Tensor) -> Tensor:
        """A copy of these rows."""
        return owned(tensor.index_select(0, index))

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The rows of all tensors, concatenated into new memory."""
        return owned(torch.cat(list(tensors)))

    def fill(self, data: Fields, free: Tensor, value: float) -> None:
        """Fills the slots that are True in `free` [B, S]."""
        for store in data.values():
            store.masked_fill_(free.reshape(len(free), *(1,) * (store.dim() - 3), -1, 1), fill_value(store, value))

    def reorder(self, data: Fields, moves: Moves, layout: Layout) -> None:
        """Copies the tokens that `moves` names from row to row."""
        for store in data.values():
            moves.slots(store, layout)

    # -- as plain tensors ------------------------------------------------------------------------------------------

    def like(self, data: Fields) -> Fields:
        """Tensors with the shapes and dtypes of `copied` for all rows; their values do not matter."""
        return data

    def copied(self, data: Fields, index: Tensor) -> Fields:
        """These rows as new tensors [R, *lead, S, width]."""
        return {name: self.select(store, index) for name, store in data.items()}

    def part(self, data: Fields, name: str, shape: Sequence[int]) -> Tensor | PagedPart:
        """The target of `copy_` for a tensor of this shape that `copied` returned, such as one from a file."""
        return data[name][tuple(slice(size) for size in shape)]
