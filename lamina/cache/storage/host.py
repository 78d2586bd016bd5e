"""Residence on the host: a layer's numbers in pinned host memory, token after token.

A part keeps its shape [B, *lead, S, width], but in memory a token's heads lie side by side: [B, S, *lead, width]. So a
run of a row's tokens is one piece, and moving it is one copy that neither is staged nor waits. Passes never touch these
numbers: they get copies in windows on the device, and what is new goes back (`storage/prefetch.py`). Verbs work on them
where they are, on the host's processor, when all copies that are under way have arrived.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lamina.cache.clock import allocate
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.layout import Layout
from lamina.cache.storage.device import Storage
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.ops.reorder import Moves
    from lamina.cache.spec import Keeping

RESIDENCES = ("device", "host")


def checked_residence(residence: str) -> str:
    """The name itself, if there is such a residence."""
    if isinstance(residence, str) and residence in RESIDENCES:
        return residence
    near = difflib.get_close_matches(str(residence), RESIDENCES, n=1, cutoff=0.0)
    raise InputError(
        f"there is no residence {residence!r}; the nearest is {near[0]!r}. Bytes live on the 'device', or on the 'host'"
    )


def storage_for(keeping: Keeping | None, by_token: bool = True) -> Storage:
    """Where a layer that is kept so has its data.

    by_token   parts are [B, *lead, S, width], with a slot for each token; else they are states, or logs by slot
    """
    if keeping is None or keeping.residence == "device":
        return Storage()
    return HostStorage(keeping.device, by_token)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Where all copies between host and this device are made, in order; None where copies are made at once."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def on_the_host(device: torch.device) -> Iterator[None]:
    """Tensors made inside are not the device's: a plan, whose tensors have no memory anywhere, does not count them."""
    if device.type != "meta":
        yield
        return
    with _disable_current_modes():
        yield


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: float | None = None) -> Tensor:
    """Room on the host for numbers of this device."""
    with on_the_host(device):
        home = device if device.type == "meta" else torch.device("cpu")
        return allocate(shape, dtype, home, fill, pinned=device.type == "cuda")


class HostStorage(Storage):
    """In pinned memory of the host. Index tensors come from the device and are taken over."""

    residence = "host"

    def __init__(self, device: torch.device, by_token: bool) -> None:
        self.device, self.by_token = device, by_token

    def by_slot(self, tensor: Tensor) -> Tensor:
        """A part [B, *lead, S, width] as it lies in memory, [B, S, *lead, width]; and back again."""
        return tensor.transpose(1, 2) if self.by_token and tensor.dim() == 4 else tensor

    def make(
        self, rows: int, lead: Sequence[int], slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self.by_slot(host_tensor((rows, slots, *lead, width), dtype, self.device, fill=0))

    def make_state(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return host_tensor(shape, dtype, self.device, fill=0)

    def widen(self, data: Fields, slots: int) -> None:
        self.settle()
        with on_the_host(self.device):
            new: Fields = {}
            for name, old in data.items():
                rows, *lead, have, width = old.shape
                new[name] = self.make(rows, lead, slots, width, old.dtype, self.device)
                new[name][..., :have, :].copy_(old)
            data.update(new)

    def cut(self, data: Fields, slots: int) -> Fields:
        self.settle()
        return super().cut(data, slots)

    def read(self, data: Fields, rows: Tensor, slots: Tensor) -> Fields:
        self.settle()
        home = next(iter(data.values())).device
        return super().read(data, rows.to(home), slots.to(home))

    def write(self, data: Fields, rows: Tensor, slots: Tensor, new: Fields) -> None:
        self.settle()
        home = next(iter(data.values())).device
        super().write(data, rows.to(home), slots.to(home), new)

    # -- verbs -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        stream = copy_stream(self.device)
        if stream is not None:
            stream.synchronize()

    def near(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def select(self, tensor: Tensor, index: Tensor) -> Tensor:
        if self._elsewhere(tensor):
            return super().select(tensor, index)
        self.settle()
        lies = self.by_slot(tensor)
        new = host_tensor((len(index), *lies.shape[1:]), tensor.dtype, self.device)
        torch.index_select(lies, 0, index.to(tensor.device), out=new)
        return self.by_slot(new)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        if self._elsewhere(tensors[0]):
            return super().join(tensors)
        self.settle()
        lie = [self.by_slot(tensor) for tensor in tensors]
        rows = sum(len(one) for one in lie)
        new = host_tensor((rows, *lie[0].shape[1:]), tensors[0].dtype, self.device)
        torch.cat(lie, out=new)
        return self.by_slot(new)

    def fill(self, data: Fields, free: Tensor, value: float) -> None:
        self.settle()
        super().fill(data, free.to(next(iter(data.values())).device), value)

    def reorder(self, data: Fields, moves: Moves, layout: Layout) -> None:
        self.settle()
        for store in data.values():
            moves.on(store.device).slots(store, layout)

    def _elsewhere(self, tensor: Tensor) -> bool:
        """Whether it is one of the small tensors (how long a source is) that stay on the device."""
        return tensor.dim() == 1
