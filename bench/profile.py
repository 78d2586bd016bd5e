"""Where the time of a captured decode step goes, kernel by kernel: `python -m bench.profile SHAPE [CONTEXT] [ROWS]`

With dependent launches a kernel is on the device while it still waits for the one before it, so times overlap and add
up to more than the step.
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from lamina.bench.bytes import decode_bytes
from lamina.bench.measure import limits, median_seconds
from lamina.bench.random_model import random_model
from lamina.bench.shapes import find_shape
from lamina.bench.subjects import Lamina

STEPS = 16


def main(shape: str, context: int = 128, rows: int = 1) -> None:
    device = torch.device("cuda")
    found = limits(device, torch.bfloat16)
    subject = Lamina(random_model(find_shape(shape).config, torch.bfloat16, device))
    subject.open(rows, context, 40 * STEPS)

    def steps() -> None:
        subject.restart()
        subject.run(STEPS)

    step = median_seconds(steps, device) / STEPS
    limit = decode_bytes(subject.model, rows, context, subject.experts_visited()).total / found.read
    subject.restart()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        subject.run(STEPS)
        torch.cuda.synchronize()
    kernels = sorted(profiled.key_averages(), key=lambda one: -one.device_time_total)
    total = sum(one.device_time_total for one in kernels)
    print(
        f"\n{shape}, {rows} rows, context {context}, {torch.cuda.get_device_name()}: {step * 1e3:.3f} ms a step, ",
        end="",
    )
    print(f"limit {limit * 1e3:.3f} ms, share {limit / step:.1%}\n")
    print("| kernel | a step | µs each | of the sum |\n|---|---|---|---|")
    for one in kernels[:14]:
        each = one.device_time_total / one.count
        print(f"| {one.key[:60]} | {one.count / STEPS:.0f} | {each:.1f} | {one.device_time_total / total:.1%} |")


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:]))
