"""Decode steps of two versions of Lamina by turns: `python -m bench.alternate OTHER_TREE [OUT.md]`

Each version runs in a process of its own, from its own source tree, with the same random weights on one GPU. For every
case the two are timed one after the other, five times, so that a device that warms up or slows down does so for both.
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

CASES = [
    ("llama-3.1-8b", 1, 128), ("llama-3.1-8b", 32, 128), ("llama-3.1-8b", 1, 16384),
    ("gemma-2-9b", 1, 128), ("mamba2-2.7b", 1, 128),
]  # fmt: skip
RUNS = 5

WORKER = """
import json, sys, torch
from lamina.bench.measure import seconds
from lamina.bench.random_model import random_model
from lamina.bench import SHAPES
from lamina.bench.subjects import Lamina

STEPS, device, subject, opened = 64, torch.device("cuda"), None, None
for line in sys.stdin:
    shape, rows, context = json.loads(line)
    if opened is None or opened[0] != shape:
        subject = None
        subject = Lamina(random_model(SHAPES[shape].config, torch.bfloat16, device))
    if opened != (shape, rows, context):
        subject.close()
        subject.open(rows, context, STEPS)
        for _ in range(2):
            subject.restart()
            subject.run(STEPS)
    opened = (shape, rows, context)
    subject.restart()
    print("took", seconds(lambda: subject.run(STEPS), device) / STEPS, torch.cuda.get_device_name(), flush=True)
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
    for case in CASES:
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
