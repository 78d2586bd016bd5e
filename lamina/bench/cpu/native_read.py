"""The read bandwidth of memory on a CPU, measured with as many threads as native programs use.

Each run reads a short window of a large buffer, and the fastest run counts: the best of many short runs is what an
idle machine would give.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lamina.bench.measure import read_bandwidth
from lamina.native import library
from lamina.native.products import products

Span = tuple[float, float]
BYTES = 256 << 20
"""Bytes of the buffer: several times the last cache."""

WINDOW = 48 << 20
"""Bytes that one run reads."""


def fewest_seconds(work: Callable[[int, int], None], threads: int, repeats: int) -> float:
    """The fewest seconds that all threads take for `work(repeat, thread)`, from a common start."""
    times = []
    for repeat in range(repeats):
        start = threading.Barrier(threads)
        spans: list[Span] = [(0.0, 0.0)] * threads

        def run(i: int, repeat: int = repeat, start: threading.Barrier = start, spans: list[Span] = spans) -> None:
            start.wait()
            begin = time.perf_counter()
            work(repeat, i)
            spans[i] = (begin, time.perf_counter())

        pool = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        times.append(max(end for _, end in spans) - min(begin for begin, _ in spans))
    return min(times)


def native_read_bandwidth(memory: Tensor, threads: int, repeats: int = 40) -> float:
    """Bytes a second that `threads` threads read together from `memory` (uint8)."""
    window = min(WINDOW, memory.numel())
    part = window // threads // 64 * 64
    windows = memory.numel() // (part * threads)

    def work(repeat: int, i: int) -> None:
        products().lamina_read(memory.data_ptr() + (repeat % windows * threads + i) * part, part)

    return part * threads / fewest_seconds(work, threads, repeats)


def cpu_read_bandwidth(threads: int) -> float:
    """Bytes a second, by native code; by PyTorch's best reduction where the native library cannot be built."""
    if library.why_not() is not None:
        return max(read_bandwidth(torch.device("cpu"), BYTES).values())
    return native_read_bandwidth(torch.ones(BYTES, dtype=torch.uint8), threads)
