"""The prefill of many shapes on a GPU, as Markdown: `python -m bench.prefill_table [--peer] [--seconds S] [LINE ...]`

The same measurements as `lamina bench --prefill table`, for machines without a terminal library. A line is printed as
soon as its shape is measured. --peer: transformers beside it. With lines, those alone: all of a shape, as
`gemma-2-9b`, or one, as `llama-3.1-8b:64`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from lamina.bench import BenchSettings, find_shape
from lamina.bench.prefill_table import PREFILL_TABLE, TableReport, run_table


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("lines", nargs="*")
    read.add_argument("--peer", action="store_true")
    read.add_argument("--seconds", type=float, default=330.0)
    read.add_argument("--out", type=Path)
    given = read.parse_args()
    lines = [
        line
        for line in PREFILL_TABLE
        if not given.lines or {line.shape, f"{line.shape}:{line.prompts.text}"} & set(given.lines)
    ]
    settings = BenchSettings(
        find_shape(lines[0].shape), torch.device("cuda"), torch.bfloat16, (), (), (lines[0].prompts,),
        against="transformers" if given.peer else None, first_token=False, seconds=given.seconds,
    )  # fmt: skip
    results = run_table(settings, lines, lambda what, *_: print(what, file=sys.stderr, flush=True))
    report = TableReport(settings, results, lines)
    print(report.markdown(None), f"\n{results.seconds:.0f} s", flush=True)
    if given.out is not None:
        report.write(given.out)


if __name__ == "__main__":
    main()
