"""Builds each kernel once for a card, to the end and without a GPU: `python -m tests.kernels.cards 86`

Run apart from the tests, whose kernels are interpreted. Prints for each kernel its name, its bytes of shared memory,
and registers and bytes of spills of a thread. `python -m bench.kernels.build` builds those of every model and use.
"""

from __future__ import annotations

import os
import sys
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is loaded, also where something could be

import torch

from bench.kernels.build import config_of
from bench.kernels.offline import Kernel, Key, built, collect, collect_others

BF16, F32 = torch.bfloat16, torch.float32
# Every kernel is launched in one of these, and most of those that take much shared memory.
CASES: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("llama-3.1-8b", BF16, dict(rows=1)),
    ("llama-3.1-8b", BF16, dict(rows=32)),
    ("llama-3.1-8b", BF16, dict(rows=8, tokens=8)),
    ("llama-3.1-8b", BF16, dict(rows=8, codec="k8v4")),
    *(("llama-3.1-8b", BF16, dict(rows=rows, weights=kind)) for rows in (1, 32) for kind in ("int4", "int8", "fp8")),
    ("gemma-2-9b", BF16, dict(rows=1, tokens=16)),
    ("deepseek-v2-lite", BF16, dict(rows=1, tokens=4)),
    ("deepseek-v2-lite", F32, dict(rows=32)),
    ("deepseek-v3.2", BF16, dict(rows=1)),
    ("qwen3-next", BF16, dict(rows=8)),
    ("qwen3-next", BF16, dict(rows=1, tokens=4)),
    ("falcon-h1-7b", BF16, dict(rows=8)),
    ("mamba2-2.7b", BF16, dict(rows=1)),
    ("mamba-2.8b", BF16, dict(rows=1)),
    ("recurrentgemma-9b", BF16, dict(rows=1)),
    ("rwkv-4-7b", BF16, dict(rows=1)),
    ("flan-t5-xl", BF16, dict(rows=1)),
]


def main(card: int) -> None:
    found: dict[Key, Kernel] = {}
    for name, dtype, how in CASES:
        collect(found, card, name, config_of(name), dtype, **how)
    collect_others(found, card, BF16)
    slow = ["BIAS", "NEW", "TOP"] if card == 90 else []  # for one card: they build slowly
    names = ["STAGES", "GATED", "APART", *slow]
    different: dict[tuple[Any, ...], Kernel] = {}
    unrolled = {} if card == 90 else {"_scan_tokens": "GROUP"}  # for one card as long as it gets: that builds slowly
    for kernel in sorted(found.values(), key=lambda one: one.constants.get(unrolled.get(one.name, ""), 0)):
        packed = kernel.name.startswith("packed")  # of these one of each kind, for one card
        kind = (kernel.constants.get(name) for name in (["KIND"] if card == 90 else []) if packed)
        kind = kind if packed else (kernel.constants.get(name) for name in names)
        different.setdefault((kernel.name, *kind), kernel)
    for kernel in different.values():
        taken = built(kernel)
        print(kernel.name, taken.shared, taken.registers, taken.spilled, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
