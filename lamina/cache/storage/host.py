"""Residence on the host: the tensors of a layer in pinned host memory, stored token by token.

A part keeps its shape [B, *lead, S, width], but its memory is laid out as [B, S, *lead, width]: the heads of a token
are contiguous. So a run of a row's tokens is contiguous too, and moving it is one asynchronous copy. Passes do not read
these tensors. They read copies in staging buffers on the device, and new tokens are copied back (`prefetch.py`). Verbs
(select, join, rewind …) work on the host's tensors, after all copies have finished.
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
    """The residence, if it is "device" or "host"; raises InputError otherwise."""
    if isinstance(residence, str) and residence in RESIDENCES:
        return residence
    near = difflib.get_close_matches(str(residence), RESIDENCES, n=1, cutoff=0.0)
    raise InputError(
        f"there is no residence {residence!r}; the nearest is {near[0]!r}. Bytes live on the 'device', or on the 'host'"
    )


def storage_for(keeping: Keeping | None, by_token: bool = True) -> Storage:
    """The storage of a layer with these settings; on the device if None.

    by_token   True if parts are [B, *lead, S, width], with a slot for each token; False for states and logs of inputs
    """
    if keeping is None or keeping.residence == "device":
        return Storage()
    return HostStorage(keeping.device, by_token)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of all copies between host and device; None if the device has no streams, and copies are immediate."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def not_counted(device: torch.device) -> Iterator[None]:
    """A plan counts tensors made on the meta device as the GPU's, but not those made inside, which are the host's."""
    if device.type != "meta":
        yield
        return
    with _disable_current_modes():
        yield


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: float | None = None) -> Tensor:
    """An empty tensor in host memory, pinned if the device is a GPU; on the meta device for a plan."""
    with not_counted(device):
        home = device if device.type == "meta" else torch.device("cpu")
        return allocate(shape, dtype, home, fill, pinned=device.type == "cuda")


class HostStorage(Storage):
    """In pinned host memory. Index tensors on the device are copied to the host."""

    residence = "host"

    def __init__(self, device: torch.device, by_token: bool) -> None:
        self.device, self.by_token = device, by_token

    def by_slot(self, tensor: Tensor) -> Tensor:
        """A view of a part [B, *lead, S, width] in the order of its memory, [B, S, *lead, width]; and the reverse."""
        return tensor.transpose(1, 2) if self.by_token and tensor.dim() == 4 else tensor

    def make(
        self, rows: int, lead: Sequence[int], slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return self.by_slot(host_tensor((rows, slots, *lead, width), dtype, self.device, fill=0))

    def make_state(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, later: bool = False) -> Tensor:
        return host_tensor(shape, dtype, self.device, fill=0)

    def widen(self, data: Fields, slots: int) -> None:
        self.settle()
        with not_counted(self.device):
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

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def select(self, tensor: Tensor, index: Tensor) -> Tensor:
        if self._on_device(tensor):
            return super().select(tensor, index)
        self.settle()
        memory = self.by_slot(tensor)
        new = host_tensor((len(index), *memory.shape[1:]), tensor.dtype, self.device)
        torch.index_select(memory, 0, index.to(tensor.device), out=new)
        return self.by_slot(new)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        if self._on_device(tensors[0]):
            return super().join(tensors)
        self.settle()
        memory = [self.by_slot(tensor) for tensor in tensors]
        rows = sum(len(one) for one in memory)
        new = host_tensor((rows, *memory[0].shape[1:]), tensors[0].dtype, self.device)
        torch.cat(memory, out=new)
        return self.by_slot(new)

    def fill(self, data: Fields, free: Tensor, value: float) -> None:
        self.settle()
        super().fill(data, free.to(next(iter(data.values())).device), value)

    def reorder(self, data: Fields, moves: Moves, layout: Layout) -> None:
        self.settle()
        for store in data.values():
            moves.on(store.device).slots(store, layout)

    def _on_device(self, tensor: Tensor) -> bool:
        """True for the small tensors that stay on the device, such as the lengths [B] of sources."""
        return tensor.dim() == 1
