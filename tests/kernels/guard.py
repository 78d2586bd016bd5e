"""A guard for interpreted kernels: every address that is read or written must lie in a tensor that somebody has.

A GPU stops a program for an address that is nobody's, and says nothing of one that is somebody else's. The interpreter
reads and writes whatever is there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

EVERY = 5  # launches, of which one is guarded: all of them would take a sixth of all time


class Guard:
    """Knows the memory of the tensors that a launch was given. For an address that is elsewhere, as tables have them,
    it looks for tensors that are somewhere in the process, and remembers those."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []
        self.launches, self.on = 0, False
        self.starts, self.ends = np.zeros(1, np.uint64), np.zeros(1, np.uint64)

    def launch(self, tensors: Iterable[Any]) -> None:
        self.launches += 1
        self.on = self.launches % EVERY == 0
        self.given = [memory_of(one) for one in tensors if isinstance(one, torch.Tensor)]

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        if not self.on:
            return
        addresses = np.asarray(pointers.data, np.uint64)
        if mask is not None:
            addresses = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)]
        if addresses.size == 0:
            return
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        first, end = int(addresses.min()), int(addresses.max()) + size
        if any(start <= first and end <= stop for start, stop in self.given):
            return
        if not self._inside(addresses, size).all():
            self._look()
            outside = addresses[~self._inside(addresses, size)]
            if outside.size:
                raise IndexError(f"{what} {outside.size} of {addresses.size} addresses that are in no tensor")

    def _inside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        at = np.searchsorted(self.starts, addresses, "right") - 1
        return addresses + np.uint64(size) <= self.ends[at]

    def _look(self) -> None:
        found = dict([(0, 0), *self.given])
        for one in gc.get_objects():
            if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu":
                with suppress(NotImplementedError):  # what `torch.func` wraps, and somebody has kept, has no memory
                    start, end = memory_of(one)
                    found[start] = end
        self.starts = np.array(sorted(found), np.uint64)
        self.ends = np.array([found[start] for start in sorted(found)], np.uint64)


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where what the tensor shares with its views begins and ends."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def watch() -> None:
    """From here on all interpreted kernels are guarded."""
    guard, builder, launch = Guard(), interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, add = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    take = launch._init_args_hst

    def guarded_take(self: Any, args: Any, named: Any) -> Any:
        taken = take(self, args, named)
        guard.launch([*taken[0], *taken[1].values()])
        return taken

    def guarded_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        guard.check("reading", pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def guarded_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        guard.check("writing", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def guarded_add(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        guard.check("adding to", pointers, mask)
        return add(self, operation, pointers, value, mask, *rest)

    launch._init_args_hst = guarded_take
    builder.create_masked_load = guarded_load
    builder.create_masked_store = guarded_store
    builder.create_atomic_rmw = guarded_add
