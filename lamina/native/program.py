"""`Program`: operations of native kernels, recorded once and run again and again by threads of the native library.

    program = Program()
    program.add("norm", NormArgs(x=x.data_ptr(), …), keep=[x, out])
    program.call(lambda: torch.topk(…))            # where there is no kernel: PyTorch, between two native stretches
    program.run()

A program holds every tensor that its operations point at. Its memory is its own, so it serves one caller at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from lamina.errors import LaminaError
from lamina.native.library import library, pytorch_team, threads


class Operation(ctypes.Structure):
    """`Operation` of program.h."""

    _fields_ = [("kernel", ctypes.c_int64), ("serial", ctypes.c_int64), ("arguments", ctypes.c_void_p)]


def operation(kernel: str, arguments: ctypes.Structure, *, serial: bool = False) -> Operation:
    """serial: it is so little work that one thread does it alone. The arguments must outlive every run."""
    return Operation(kernel_index(kernel, type(arguments)), int(serial), ctypes.addressof(arguments))


class Program:
    """names   of the operations, in order; those that PyTorch runs begin with "torch:" """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._stretches: list[list[Operation] | Callable[[], object]] = []
        self._ready: list[tuple[Any, int] | Callable[[], object]] | None = None
        self._kept: list[Any] = []

    def add(self, kernel: str, arguments: ctypes.Structure, keep: Iterable[Any] = (), *, serial: bool = False) -> None:
        """Appends an operation.

        keep     what `arguments` points at
        serial   True: it is so little work that one thread does it alone
        """
        if not self._stretches or not isinstance(self._stretches[-1], list):
            self._stretches.append([])
        stretch = self._stretches[-1]
        assert isinstance(stretch, list)
        stretch.append(operation(kernel, arguments, serial=serial))
        self._kept += [arguments, *keep]
        self.names.append(kernel)
        self._ready = None

    def call(self, name: str, function: Callable[[], object], keep: Iterable[Any] = ()) -> None:
        """Appends a call of Python, which runs between two native stretches."""
        self._stretches.append(function)
        self._kept += keep
        self.names.append(f"torch:{name}")
        self._ready = None

    def run(self) -> None:
        """Runs all operations in order. The interpreter's lock is released in native stretches."""
        if self._ready is None:
            self._ready = [
                ((Operation * len(one))(*one), len(one)) if isinstance(one, list) else one for one in self._stretches
            ]
        run, count = library().lamina_run, threads()
        for one in self._ready:
            if isinstance(one, tuple):
                run(one[0], one[1], count)
            else:
                one()

    def __len__(self) -> int:
        return len(self.names)


def run_on_pytorch_threads(operations: Sequence[Operation]) -> None:
    """Runs operations in order, outside a program. Between operations of PyTorch other threads would compete with its
    own, which wait for work on the same cores for a while."""
    count, team = len(operations), pytorch_team()
    array = (Operation * count)(*operations)
    if team is None:
        library().lamina_run(array, count, threads())
    else:
        library().lamina_run_on(array, count, threads(), team, torch.get_num_threads())


@cache
def kernel_index(name: str, arguments: type[ctypes.Structure]) -> int:
    size = ctypes.c_int64(0)
    index: int = library().lamina_kernel(name.encode(), ctypes.byref(size))
    if index < 0 or size.value != ctypes.sizeof(arguments):
        raise LaminaError(
            f"the native library has no kernel {name!r} with {ctypes.sizeof(arguments)} bytes of arguments"
        )
    return index
