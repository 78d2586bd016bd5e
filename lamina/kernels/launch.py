"""How kernels are launched: on Hopper and later, one begins while the one before it is still finishing.

Programmatic dependent launch hides the gap between two kernels. A kernel calls `begin(PDL)` first of all: it waits
until what it depends on is written, then lets its own successor be launched. `PDL` is a constexpr, from `pdl()`.
Weights, which depend on nobody, may be asked for before; so may what was written before the kernel in front began.

A kernel may call `begin_together(PDL)` instead, which lets its successor be launched first and then waits. That one can
ask for its weights a little sooner, but may then begin while the kernel in front of both still writes: nothing of what
that writes may it read before its own `begin`.

    kernel[grid](..., PDL=pdl(), **launch_options())
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from lamina.kernels import INTERPRETED

BY_ASSEMBLY = tl.constexpr(not INTERPRETED)  # whether a kernel may use instructions of the device by their names


@cache
def pdl() -> bool:
    """Whether the current device can launch a kernel before the one it depends on has finished."""
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def launch_options() -> dict[str, Any]:
    """What a launch is given beside its arguments, `num_warps` and `num_stages`."""
    return {"launch_pdl": True} if pdl() else {}


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
