"""How kernels are timed: many launches in one CUDA graph, over buffers that together do not fit L2, replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from lamina.bench.measure import read_bandwidth

Call = Callable[[], object]


def microseconds(calls: Sequence[Call], *, repeats: int = 5) -> float:
    """The time of one call, where `calls` run one after the other in a graph that is replayed."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        calls[0]()  # compiled, and its scratch store made
        torch.cuda.synchronize()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return median(times)


def read_speed() -> float:
    """TB/s of reading alone, by the fastest way to read; said in a line, since shares are of it."""
    speed = max(read_bandwidth(torch.device("cuda"), 2 << 30).values()) / 1e12
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, read {speed:.2f} TB/s", flush=True)
    return speed


def all_at_once(calls: Sequence[Call], threads: int = 16) -> list[str]:
    """Runs each call once, so that the kernels compile side by side; what went wrong, one line for each that failed."""

    def attempt(call: Call) -> str:
        try:
            call()
        except Exception as error:  # a form that does not compile must not hide the others
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return ""

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(attempt, calls))
    torch.cuda.synchronize()
    return found
