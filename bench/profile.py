"""Where the time of a captured decode step goes, kernel by kernel: `python -m bench.profile SHAPE [CONTEXT] [ROWS]`

With dependent launches a kernel is on the device while it still waits for the one before it, so its times overlap with
others' and say little. So the step is captured once more with launches that wait for each other: what a kernel takes
then is its own, and the sum is more than the step takes. Launches of one kernel are distinguished by their grids, so
products share a line where their weights have as many outputs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lamina.bench.measure import limits, median_seconds
from lamina.bench.random_model import random_model
from lamina.bench.subjects import Lamina
from lamina.checkpoint.shapes import find_shape
from lamina.kernels.limits import assumed, limits_of
from lamina.planning.bytes import decode_bytes

STEPS = 16
Launch = tuple[str, str]  # a kernel's name and its grid


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Inside, launches are not programmatic, as on a device before Hopper."""
    with assumed(replace(limits_of(torch.device("cuda")), capability=(8, 0))):
        yield


def kernels_of(trace: Mapping[str, Any]) -> dict[Launch, list[float]]:
    """The times of all launches in a trace, µs.

    >>> one = {"cat": "kernel", "name": "f", "dur": 2.0, "args": {"grid": [8, 4, 1]}}
    >>> kernels_of({"traceEvents": [one, {"cat": "cpu_op", "name": "g"}, one]})
    {('f', '8 x 4'): [2.0, 2.0]}
    """
    found = defaultdict[Launch, list[float]](list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            grid = " x ".join(map(str, event["args"]["grid"]))
            while grid.endswith(" x 1"):
                grid = grid.removesuffix(" x 1")
            found[event["name"], grid].append(event["dur"])
    return dict(found)


def step_of(subject: Lamina) -> float:
    """Seconds of a step."""

    def steps() -> None:
        subject.restart()
        subject.run(STEPS)

    return median_seconds(steps, subject.model.device) / STEPS


def main(shape: str, context: int = 128, rows: int = 1) -> None:
    device = torch.device("cuda")
    found = limits(device, torch.bfloat16)
    found_shape = find_shape(shape)
    subject = Lamina(random_model(found_shape.config, torch.bfloat16, device), source=found_shape.source)
    room = 40 * STEPS
    if subject.model.max_positions is not None:
        room = min(room, subject.model.max_positions - context)
    subject.open(rows, context, room)
    step = step_of(subject)
    limit = (
        decode_bytes(subject.model, rows, context, subject.experts_visited(), source=found_shape.source).total
        / found.read
    )
    with one_after_the_other():
        subject.model.graphs.clear()
        apart = step_of(subject)
        subject.restart()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            subject.run(STEPS)
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        launches = kernels_of(json.loads(Path(folder, "trace.json").read_text()))
    what = f"{shape}, {rows} rows, context {context}, {torch.cuda.get_device_name()}"
    print(f"\n{what}: {step * 1e3:.3f} ms a step, limit {limit * 1e3:.3f} ms, share {limit / step:.1%};", end=" ")
    print(f"{apart * 1e3:.3f} ms where every launch waits for the one before:\n")
    print("| kernel | grid | a step | µs each | ms a step |\n|---|---|---|---|---|")
    for (name, grid), times in sorted(launches.items(), key=lambda one: -sum(one[1]))[:20]:
        each, often = sum(times) / len(times), len(times) / STEPS
        print(f"| {name[:60]} | {grid} | {often:.0f} | {each:.1f} | {sum(times) / STEPS / 1e3:.3f} |")
    print(f"| all | | | | {sum(map(sum, launches.values())) / STEPS / 1e3:.3f} |")


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))
