"""Launches of kernels: on the device of their tensors, with programmatic dependent launch (PDL) from Hopper on.

    launch(kernel, grid, out, x, …, num_warps=4, BLOCK=128)

PDL starts a kernel before the one in front has finished, which hides the gap between the two. A kernel calls
`begin(PDL)` before it reads anything that the kernel in front writes: it waits until that kernel has finished, then
lets the next kernel start. `PDL` is a constexpr that `launch` passes. A kernel may load weights, and everything that
was written before the kernel in front started, before `begin`.

A kernel may call `begin_together(PDL)` instead, which lets the next kernel start first and then waits; `begin` does the
same in a launch with `early=True`. The next kernel can load its weights a little sooner, but may then start while the
kernels in front of both still write. So before its own `begin` it must not read what any of them writes. Of all kernels
one reads such values there: `gemm/experts.py` reads the chosen experts, so its kernels are never launched early.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels import INTERPRETED
from lamina.kernels.device_guard import current
from lamina.kernels.limits import limits_of

EARLY = tl.constexpr(2)  # as PDL: see `launch`
BY_ASSEMBLY = tl.constexpr(not INTERPRETED)  # whether kernels may contain PTX


class Launched(NamedTuple):
    """A launch that was left out (`dry`): the module and name of its kernel, and its constexprs."""

    module: str
    kernel: str
    options: dict[str, Any]


_builds: ContextVar[bool] = ContextVar("builds", default=False)
_dry: ContextVar[list[Launched] | None] = ContextVar("dry", default=None)


def launch(
    kernel: Any, grid: tuple[int, ...], first: Tensor, *others: Any, early: bool = False, **options: Any
) -> None:
    """Launches a kernel on the device of its first argument, whichever device is the current one.

    Triton uses the current device and its current stream, so the tensors' device is made current.

    early   `begin` lets the next kernel start before it waits; for kernels of a few microseconds, where what the next
            one loads before its own `begin` takes as long as this kernel
    """
    if (launched := _dry.get()) is not None:
        launched.append(Launched(kernel.fn.__module__, kernel.fn.__name__, options))
        return
    pdl = limits_of(first.device).pdl
    if pdl:
        options["launch_pdl"] = True
    with current(first.device):
        how = EARLY.value if pdl and early else pdl
        kernel.run(first, *others, grid=grid, warmup=_builds.get(), PDL=how, **options)


@contextmanager
def build_only() -> Iterator[None]:
    """Inside, in this thread, `launch` builds its kernel and does not run it."""
    before = _builds.set(True)
    try:
        yield
    finally:
        _builds.reset(before)


@contextmanager
def dry(launched: list[Launched] | None = None) -> Iterator[None]:
    """Inside, in this thread, a launch does nothing but add itself to the list: kernels are neither built nor run."""
    before = _dry.set([] if launched is None else launched)
    try:
        yield
    finally:
        _dry.reset(before)


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the kernel in front, whose output must not be read before; then lets the next kernel start."""
    if PDL == EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    elif PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_together(PDL: tl.constexpr):
    """As `begin`, but lets the next kernel start before it waits."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_l2(pointer, size):
    """Prefetches `size` bytes (a multiple of 16) to the L2 cache, from one thread of the program."""
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


@triton.jit
def prefetch_lines(pointers):
    """Prefetches the 128 bytes around each pointer of a tensor to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
