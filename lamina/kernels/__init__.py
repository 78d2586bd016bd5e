"""Triton kernels for decoding, limited by reading each weight and each cached token once, and for prompts.

Every kernel has a readable reference in PyTorch that gives the same values (`lamina.nn`, `lamina.attention`,
`lamina.recurrence`, or a function beside the kernel). Modules with kernels import Triton at the top, so they are
imported only where `usable` returns True. This module, `columns`, `eligibility`, `limits` and `workspace` can be
imported anywhere. With TRITON_INTERPRET=1 in the environment when Python starts, kernels run on the CPU, slowly, which
is how they are tested.

In comments, B is rows (sequences), T new tokens per row, H heads (Hq of queries, Hk of keys and values), D and DV
values per head of keys and of values, S slots, V the vocabulary. `table` points to one row of the cache's entry table
(`columns.py`). `PDL` is passed by `launch`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lamina.kernels.workspace import Workspace

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read once: Triton decides when a kernel is defined

_in_use: dict[int, tuple[Workspace | None, Any]] = {}  # thread inside `in_use` -> its workspace and its recorder
_workspaces: dict[int, Workspace] = {}  # thread inside `in_workspace` -> the workspace of its kernels


def on() -> bool:
    """Whether the modules of `lamina.nn` use kernels: True in a thread that is inside a captured program."""
    return len(_in_use) > 0 and get_ident() in _in_use


def workspace_in_use() -> Workspace | None:
    """The workspace of the captured program that this thread is inside of, if any."""
    me = get_ident()
    return _in_use.get(me, (None, None))[0] or _workspaces.get(me)


def recorder() -> Any:
    """The `lamina.native.operations.NativeRecorder` of the native program that this thread records; None if kernels are
    Triton's."""
    return _in_use.get(get_ident(), (None, None))[1] if len(_in_use) > 0 else None  # so that Dynamo can trace it


@contextmanager
def in_use(workspace: Workspace | None = None, recorder: Any = None) -> Iterator[None]:
    """Inside, in this thread only, the modules of `lamina.nn` use kernels: Triton's, whose scratch memory is
    `workspace`, or those that `recorder` records for a native program."""
    with _set(_in_use, (workspace, recorder)):
        yield


@contextmanager
def in_workspace(workspace: Workspace) -> Iterator[None]:
    """Inside, in this thread only, kernels have this scratch memory; modules run as in a plain pass."""
    with _set(_workspaces, workspace):
        yield


@contextmanager
def _set(values: dict[int, Any], value: Any) -> Iterator[None]:
    """Inside, the value of this thread; afterwards what it was before."""
    me = get_ident()
    nested, before = me in values, values.get(me)
    values[me] = value
    try:
        yield
    finally:
        if nested:
            values[me] = before
        else:
            del values[me]


@cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def why_not(x: Tensor) -> str | None:
    """The reason why kernels cannot work on this tensor, in words; None if they can.

    >>> INTERPRETED or why_not(torch.zeros(1)) is not None
    True
    """
    if not installed():
        return "Triton is not installed"
    if not INTERPRETED:
        from lamina.kernels.eligibility import why_no_device  # which imports this package

        if reason := why_no_device(x.device):
            return reason
    if x.dtype == torch.float64:
        return "the kernels compute in float32, the tensors are float64"
    return None


def usable(x: Tensor) -> bool:
    """Whether kernels can work on this tensor."""
    return why_not(x) is None


_rehearsed: ContextVar[bool] = ContextVar("rehearsed", default=False)


def rehearsing() -> bool:
    """Whether this thread runs passes on the meta device as a GPU would run them."""
    return _rehearsed.get()


@contextmanager
def rehearsed() -> Iterator[None]:
    """Inside, in this thread, tensors of the meta device count as those of a GPU; launches must be `launch.dry`."""
    before = _rehearsed.set(True)
    try:
        yield
    finally:
        _rehearsed.reset(before)


def fuses(x: Tensor) -> bool:
    """Whether the modules of `lamina.nn` use kernels for what stands between products: in plain passes on a GPU, where
    nobody wants gradients.

    >>> fuses(torch.zeros(1))
    False
    """
    if not (x.is_cuda or x.is_meta) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return usable(x) if x.is_cuda else rehearsing()
