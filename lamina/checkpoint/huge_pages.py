"""Huge pages for weights in main memory: with pages of 2 MB instead of 4 kB, reading them is up to half again as fast.

Many systems give huge pages only on request. `ask_for_huge_pages` requests them before a tensor is filled, which costs
nothing; `collapse` then has the kernel merge the small pages that are left between tensors, for a limited time. The
addresses of tensors do not change. Where this is not possible (another system, an old kernel), nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterable
from functools import cache

from torch import Tensor

HUGE, PAGE = 2 << 20, 4 << 10
ASK, COLLAPSE = 14, 25  # MADV_HUGEPAGE and MADV_COLLAPSE of the Linux kernel


def ask_for_huge_pages(tensor: Tensor) -> None:
    """To be called before the memory is first written to."""
    if tensor.device.type == "cpu" and tensor.nbytes >= PAGE:
        start, end = tensor.data_ptr() // PAGE * PAGE, -(-(tensor.data_ptr() + tensor.nbytes) // PAGE) * PAGE
        _advise(start, end - start, ASK)


def collapse(tensors: Iterable[Tensor], seconds: float = 0.5) -> int:
    """Moves tensors that have asked into huge pages, where they are not yet; returns the bytes that are known to be.

    >>> collapse([])
    0
    """
    inside, until = 0, time.perf_counter() + seconds
    for start, end in joined((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.device.type == "cpu"):
        for at in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):
            if time.perf_counter() > until:
                return inside
            inside += HUGE if _advise(at, HUGE, COLLAPSE) else 0
    return inside


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that touch, give or take a page, as one: a huge page may hold the end of a tensor and the next's start.

    >>> joined([(8192, 9000), (0, 5000), (90000, 99000)])
    [(0, 9000), (90000, 99000)]
    """
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + PAGE:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _advise(start: int, size: int, advice: int) -> bool:
    function = _madvise()
    return function is not None and function(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
