"""How kernels are launched: on the device of their tensors, and from Hopper on before the kernel in front is done.

    launch(kernel, grid, out, x, …, num_warps=4, BLOCK=128)

Programmatic dependent launch (PDL) hides the gap between two kernels. A kernel calls `begin(PDL)` first of all: it
waits until what it depends on is written, then lets its own successor be launched. `PDL` is a constexpr that `launch`
gives. Weights, which depend on nobody, may be asked for before; so may what was written before the kernel in front
began.

A kernel may call `begin_together(PDL)` instead, which lets its successor be launched first and then waits. That one can
ask for its weights a little sooner, but may then begin while the kernel in front of both still writes: nothing of what
that writes may it read before its own `begin`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels import INTERPRETED
from lamina.kernels.device_guard import current
from lamina.kernels.limits import limits_of

BY_ASSEMBLY = tl.constexpr(not INTERPRETED)  # whether a kernel may use instructions of the device by their names

_builds: ContextVar[bool] = ContextVar("builds", default=False)
_dry: ContextVar[bool] = ContextVar("dry", default=False)


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *others: Any, **options: Any) -> None:
    """Launches a kernel with these arguments on the device of the first one, whichever device is the current one.

    Triton takes the current device and its current stream; so the tensors' device is made the current one.
    """
    if _dry.get():
        return
    pdl = limits_of(first.device).pdl
    if pdl:
        options["launch_pdl"] = True
    with current(first.device):
        kernel.run(first, *others, grid=grid, warmup=_builds.get(), PDL=pdl, **options)


@contextmanager
def building() -> Iterator[None]:
    """Inside, in this thread, a launch builds its kernel and does nothing else."""
    before = _builds.set(True)
    try:
        yield
    finally:
        _builds.reset(before)


@contextmanager
def dry() -> Iterator[None]:
    """Inside, in this thread, a launch does nothing: kernels are neither built nor run."""
    before = _dry.set(True)
    try:
        yield
    finally:
        _dry.reset(before)


@triton.jit
def begin(PDL: tl.constexpr):
    """The first line of a kernel: nothing that the kernel in front wrote may be read before it."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_together(PDL: tl.constexpr):
    """As `begin`, but the kernel behind may begin at once."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(pointer, size):
    """Asks `size` bytes (a multiple of 16) into the L2 cache; one thread of the program does."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [pointer.to(tl.int64), size.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
