"""`Recorder`: watches a pass of a model and records it as a native program.

Modules and memory calls that have a native kernel add it themselves (`operations.py`, `attend.py`). Every operation of
PyTorch in between passes through `__torch_dispatch__`, so nothing goes unrecorded:

    views                       nothing to do: the same memory
    results of constants alone  computed once, now
    elementwise operations      a native kernel (`elementwise.py`)
    anything else               called again by PyTorch in each run, between two native stretches

Recording computes nothing that is used: tensors that vary hold zeros meanwhile. An operation that reads such a value on
the host cannot be recorded and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamina.errors import CaptureError
from lamina.native.elementwise import elementwise_of
from lamina.native.program import Program

aten = torch.ops.aten
HOST = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""Operations whose result, or its shape, depends on values that vary."""
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Recorder(TorchDispatchMode):
    """
    program    what is recorded so far
    made       results that later operations share, by what they were made of
    constants  tensors that results were computed from once, with their versions: see `is_stale`
    integer    whether products with packed integer weights quantize their activations to int8
    """

    def __init__(self, program: Program, inputs: Iterable[Tensor], integer: bool = True) -> None:
        super().__init__()
        self.program, self.integer = program, integer
        self.constants: list[tuple[Tensor, int]] = []
        self._varying: set[int] = set()
        self._alive: list[Tensor] = []
        self._scratch: dict[tuple[Any, ...], Tensor] = {}
        self.made: dict[tuple[Any, ...], Any] = {}
        for one in inputs:
            self.varies(one)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch would otherwise import torch._dynamo at the first recorded operation, which takes seconds."""
        return False

    # -- what varies ------------------------------------------------------------------------------------------------

    def varies(self, x: Tensor) -> Tensor:
        """Marks the memory of x as different in each run."""
        self._varying.add(_memory(x))
        self._alive.append(x)
        return x

    def is_varying(self, x: Tensor) -> bool:
        return _memory(x) in self._varying

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that an operation of the program writes."""
        return self.varies(torch.zeros(shape, dtype=dtype))

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory of this shape that operations share, zero at first; what one leaves there another may overwrite."""
        key = (shape, dtype)
        if key not in self._scratch:
            self._scratch[key] = self.new(*shape, dtype=dtype)
        return self._scratch[key]

    def add(self, kernel: str, arguments: Any, *keep: Any, work: int) -> None:
        """Appends a kernel. work: values that it reads and writes, by which one thread or all run it"""
        self.program.add(kernel, arguments, keep, serial=work < SERIAL)

    @property
    def is_stale(self) -> bool:
        """Whether a constant that results were computed from has been changed since."""
        return any(one._version != version for one, version in self.constants)

    # -- operations of PyTorch --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE) and not func.is_view:
            with self:
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(map(self.is_varying, given)):
            if func._schema.is_mutable and given:
                self._restore(given[0])
                self.varies(given[0])
                return self._record(func, args, kwargs, given)
            out = func(*args, **kwargs)
            self._fold(given, out)
            return out
        if func in HOST:
            raise CaptureError(f"{func.name()} reads values of a step on the host")
        return self._record(func, args, kwargs, given)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        if func._schema.is_mutable:
            for x in given:
                if not self.is_varying(x) and _writes(func, args, kwargs, x):
                    self._restore(x)
                    self.varies(x)
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {_memory(x) for x in given}
        fresh = [x for x in made if _memory(x) not in known]
        if not func._schema.is_mutable and not fresh:
            return out  # a view
        for x in fresh:
            self.varies(x)
        self._alive += given
        if elementwise_of(self, func, args, kwargs, out):
            return out
        function = _again(func, args, kwargs, made if not func._schema.is_mutable else [])
        self.program.call(func.name().removeprefix("aten::"), function)
        return out

    def _fold(self, given: list[Tensor], out: Any) -> None:
        """Remembers what a constant was computed from."""
        self._alive += [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {_memory(x) for x in given}
        if any(isinstance(x, Tensor) and _memory(x) not in known for x in tree_leaves(out)):
            self.constants += [(x, x._version) for x in given if not x.is_inference()]

    def _restore(self, x: Tensor) -> None:
        """Before a constant of this recording is changed in place, each run gives it its first value again."""
        first = x.clone()
        self.program.call("copy_", lambda: x.copy_(first), [x, first])


SERIAL = 16384
"""Values below which one thread does an operation alone: meeting the others would take longer."""


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> bool:
    """Whether func writes x."""
    names = [argument.name for argument in func._schema.arguments]
    by_name = dict(zip(names, args, strict=False)) | kwargs
    written = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return any(x is one for name in written for one in tree_leaves(by_name.get(name)))


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], into: list[Tensor]) -> Callable[[], object]:
    """A function that calls func again and puts its results where they were put first."""

    def call() -> None:
        made = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
        for old, new in zip(into, made, strict=False):
            old.copy_(new)

    return call
