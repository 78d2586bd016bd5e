"""Triton kernels for decoding: few tokens at a time, where the time is that of reading each weight and kept token once.

Every kernel has a readable reference in PyTorch (`lamina.nn`, `lamina.attention`, `lamina.recurrence`, or a function
beside it) that gives the same numbers. A module of this package imports Triton at its top, so it is imported only where
`usable` says yes; this one can be imported anywhere. With TRITON_INTERPRET=1 in the environment when Python starts, the
kernels run on the CPU, slowly, which is how they are tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lamina.kernels.workspace import Workspace

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels are built for one or the other, once


_in_use: dict[int, Workspace | None] = {}  # by thread: inside `in_use`, and the workspace of its kernels


def on() -> bool:
    """Whether the modules of `lamina.nn` are to use kernels: in a thread that is inside a captured program."""
    return len(_in_use) > 0 and get_ident() in _in_use


def workspace_in_use() -> Workspace | None:
    """The workspace of the captured program that this thread is inside of, if it is."""
    return _in_use.get(get_ident())


@contextmanager
def in_use(workspace: Workspace | None = None) -> Iterator[None]:
    """Inside, and in this thread alone, the modules of `lamina.nn` use kernels, and these work in `workspace`."""
    me = get_ident()
    nested, before = me in _in_use, _in_use.get(me)
    _in_use[me] = workspace
    try:
        yield
    finally:
        if nested:
            _in_use[me] = before
        else:
            del _in_use[me]


@cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def why_not(x: Tensor) -> str | None:
    """Why kernels cannot work on this tensor, in words; None when they can.

    >>> INTERPRETED or why_not(torch.zeros(1)) is not None
    True
    """
    if not installed():
        return "Triton is not installed"
    if not INTERPRETED:
        from lamina.kernels.eligibility import why_no_device

        if reason := why_no_device(x.device):
            return reason
    if x.dtype == torch.float64:
        return "the kernels compute in float32, the tensors are float64"
    return None


def usable(x: Tensor) -> bool:
    """Whether kernels can work on this tensor."""
    return why_not(x) is None
