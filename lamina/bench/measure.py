"""What the device can do (bandwidths, matrix rate, memory), and how long things take on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lamina import kernels


@dataclass(frozen=True)
class DeviceRates:
    """Bytes and operations a second, as measured."""

    read: float
    read_by: str
    """The way of reading that was fastest."""
    read_by_torch: float
    """The fastest of PyTorch's own reductions, which others measure by."""
    copy: float
    matrix: float

    def better(self, other: DeviceRates) -> DeviceRates:
        """The higher of each."""
        first = max(self, other, key=lambda one: one.read)
        torchs, copy, matrix = (
            max(getattr(self, name), getattr(other, name)) for name in ("read_by_torch", "copy", "matrix")
        )
        return DeviceRates(first.read, first.read_by, torchs, copy, matrix)


def limits(device: torch.device, dtype: torch.dtype, nbytes: int | None = None) -> DeviceRates:
    """Measures the device; `nbytes` is the size of the buffer, which must be much larger than its caches."""
    if nbytes is None:
        nbytes = 4 * 2**30 if device.type == "cuda" else 512 * 2**20
    read = read_bandwidth(device, nbytes)
    best = max(read, key=lambda way: read[way])
    by_torch = max(rate for way, rate in read.items() if way != "triton")
    return DeviceRates(read[best], best, by_torch, copy_bandwidth(device, nbytes), matrix_rate(device, dtype))


def read_bandwidth(device: torch.device, nbytes: int) -> dict[str, float]:
    """Bytes a second of several ways to read a buffer."""
    x = torch.empty(nbytes // 4, device=device).uniform_()
    ways: dict[str, Callable[[], object]] = {"sum": x.sum, "dot": lambda: torch.dot(x, x), "amax": x.amax}
    if x.is_cuda and kernels.usable(x):
        from lamina.bench.read_kernel import read  # imports Triton

        ways["triton"] = lambda: read(x)
    return {name: x.nbytes / steady_seconds(way, device) for name, way in ways.items()}


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes a second, those read and those written."""
    x, y = (torch.empty(nbytes // 4, device=device).uniform_() for _ in range(2))
    return 2 * x.nbytes / steady_seconds(lambda: y.copy_(x), device)


def matrix_rate(device: torch.device, dtype: torch.dtype, enough: float = 0.05) -> float:
    """Operations a second of one large product, at the first size that takes long enough or is large enough."""
    largest = 8192 if device.type == "cuda" else 2048
    n = largest if device.type == "cuda" else 256
    while True:
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        seconds = median_seconds(partial(torch.matmul, a, b), device, runs=5)
        if seconds > enough or n >= largest:
            return 2 * n**3 / seconds
        n *= 2


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long the device takes for it, from an idle device on."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def median_seconds(work: Callable[[], object], device: torch.device, runs: int = 5, warmups: int = 2) -> float:
    for _ in range(warmups):
        work()
    return statistics.median(seconds(work, device) for _ in range(runs))


def steady_seconds(work: Callable[[], object], device: torch.device, times: int = 8) -> float:
    """How long it takes where it is done again and again: a device that is idle before waits for the host first."""

    def again() -> None:
        for _ in range(times):
            work()

    return median_seconds(again, device, warmups=1) / times


class Peak:
    """The most memory that was held at once in a `with` block beyond what was held before; None where not known.

    >>> with Peak(torch.device("cpu")) as peak:
    ...     pass
    >>> peak.nbytes
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes: int | None = None

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.nbytes = torch.cuda.max_memory_allocated(self.device) - self._before


def free_memory(device: torch.device) -> int:
    """Bytes that new tensors can take."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return _kibibytes("/proc/meminfo", "MemAvailable") or 2**62


def peak_of_process(device: torch.device) -> int | None:
    """The most memory this process has held: the device's where it has its own, else all of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return _kibibytes("/proc/self/status", "VmHWM")


def _kibibytes(file: str, name: str) -> int | None:
    """A line of a Linux status file, in bytes; None where there is no such file."""
    lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


def random_ids(shape: tuple[int, ...], vocab: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed)).to(device)
