"""Decode steps of two versions of Lamina by turns: `python -m bench.alternate OTHER_TREE [OUT.md]`

Each version runs in a process of its own, from its own source tree, with the same random weights on one GPU, or on the
CPU where there is none. For every case the two are timed one after the other, five times, so that a device that warms
up or slows down does so for both.
`git archive OTHER_COMMIT lamina | tar -x -C OTHER_TREE` makes such a tree.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

CASES = [
    ("llama-3.1-8b", 1, 128), ("llama-3.1-8b", 32, 128), ("llama-3.1-8b", 1, 16384),
    ("gemma-2-9b", 1, 128), ("mamba2-2.7b", 1, 128),
]  # fmt: skip
ON_A_CPU = [("smollm2-135m", 1, 64), ("smollm2-135m, compiled", 1, 64), ("smollm2-135m, compiled", 1, 2000)]
RUNS = 5

WORKER = """
import json, sys, torch
from lamina.bench.measure import seconds
from lamina.bench.random_model import random_model
from lamina.bench import SHAPES
from lamina.bench.subjects import CompiledLamina, Lamina

STEPS, subject, opened, there = 64, None, None, torch.cuda.is_available()
device, dtype = (torch.device("cuda"), torch.bfloat16) if there else (torch.device("cpu"), torch.float32)
for line in sys.stdin:
    shape, rows, context = json.loads(line)
    if opened is None or opened[0] != shape:
        subject, (name, *compiled) = None, shape.split(", ")
        subject = (CompiledLamina if compiled else Lamina)(random_model(SHAPES[name].config, dtype, device))
    if opened != (shape, rows, context):
        subject.close()
        subject.open(rows, context, STEPS)
        for _ in range(2):
            subject.restart()
            subject.run(STEPS)
    opened = (shape, rows, context)
    subject.restart()
    machine = torch.cuda.get_device_name() if there else "CPU"
    print("took", seconds(lambda: subject.run(STEPS), device) / STEPS, machine, flush=True)
"""


class Version:
    """One source tree, in a process that times steps when it is asked to."""

    def __init__(self, tree: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.device = ""

    def time(self, case: tuple[str, int, int]) -> float:
        """Seconds of a decode step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("took "):
                _, seconds, self.device = line.strip().split(" ", 2)
                return float(seconds)
        raise SystemExit(f"the process that times {case} ended")


def main(other: str, out: str | None = None) -> None:
    here = Path(__file__).resolve().parent.parent
    old, new = Version(Path(other).resolve()), Version(here)
    lines = []
    for case in CASES if torch.cuda.is_available() else ON_A_CPU:
        times: list[tuple[float, float]] = []
        for run in range(RUNS + 1):
            first, second = (old, new) if run % 2 else (new, old)  # neither is always the first
            took = {first: first.time(case), second: second.time(case)}
            if run:  # the first time kernels are built and loaded
                times.append((took[old], took[new]))
        before, after = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        spread = max(max(column) / min(column) - 1 for column in zip(*times, strict=True))
        shape, rows, context = case
        change = f"{before:.3f} | {after:.3f} | {after / before - 1:+.2%} | {spread:.1%}"
        lines.append(f"| {shape} | {rows} | {context} | {change} |")
        print(lines[-1], flush=True)
    text = [
        f"Machine: {new.device}, {date.today()}. Command: `python -m bench.alternate OTHER_TREE`. Medians of "
        f"{RUNS} runs by turns.",
        "",
        "| shape | rows | context | other, ms a step | this, ms a step | change | spread of runs |",
        "|---|---|---|---|---|---|---|",
        *lines,
    ]
    print("\n".join(text))
    if out is not None:
        Path(out).write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
