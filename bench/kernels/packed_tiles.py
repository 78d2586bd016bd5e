"""What tiles of packed products take of an SM, found without a GPU: `python -m bench.kernels.packed_tiles [--rows 32]`

For every configuration that `packed_search` times: how many programs fit an SM, how many the busiest SM runs (an SM
that runs two where the others run one doubles the time), what all programs read of the vectors from L2 beside the
weight, and the instructions of the loop for each value of the weight. All are of the H200's SMs. "wait": ptxas made
each wgmma instruction wait for the one before.

    --only int4,int8,fp8   formats        --jobs 2   processes
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from tempfile import NamedTemporaryFile

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import triton
from triton import knobs

from bench.kernels.offline import Kernel, Key, built, collected, instead_of_a_gpu, target_of
from bench.kernels.packed import FORMATS, LLAMA, one, packed
from bench.kernels.packed_search import candidates
from lamina.kernels.gemm.product import Tiles
from lamina.kernels.limits import CARDS, KIB, RESERVED
from lamina.runtime.builders import build_together

CARD = 90
REGISTERS, THREADS = 65536, 2048  # of an SM
COLUMNS = (
    "product",
    "tiles",
    "registers",
    "KiB",
    "fit an SM",
    "busiest SM",
    "x, MB",
    "weight, MB",
    "instructions a value",
)


@dataclass(frozen=True)
class Case:
    format: str
    product: str
    tiles: Tiles
    rows: int


def describe(case: Case) -> str:
    """A line of the table."""
    m, k, pair = LLAMA[case.product]
    tiles, programs = case.tiles, -(-m // case.tiles.rows) * case.tiles.splits
    kernel, nbytes = kernel_of(case)
    taken = built(kernel)
    assert taken.registers is not None
    threads, room = 32 * tiles.warps, (CARDS[CARD].shared + RESERVED) // (taken.shared + RESERVED)
    fit = min(REGISTERS // (-(-taken.registers // 8) * 8 * threads), room, THREADS // threads)
    each = programs / CARDS[CARD].multiprocessors
    vectors = programs * case.rows * k / tiles.splits * 2
    cost = loop_of(kernel) * threads / (tiles.rows * (1 + pair) * tiles.block)
    cells = (
        f"{case.format} {case.product}",
        f"{tiles.rows} × {tiles.block}, {tiles.warps} warps, {tiles.stages} stages, {tiles.splits} splits"
        + (", apart" if tiles.apart else "") + (", bulk" if tiles.bulk else ""),
        f"{taken.registers}" + (f", {taken.spilled} B spilled" if taken.spilled else "") + ", wait" * taken.waits,
        f"{taken.shared / KIB:.0f}", f"{fit}", f"{math.ceil(each)} of {each:.2f}", f"{vectors / 1e6:.0f}",
        f"{nbytes / 1e6:.0f}", f"{cost:.2f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def kernel_of(case: Case) -> tuple[Kernel, int]:
    """The kernel of a case, and the bytes of its weight."""
    m, k, pair = LLAMA[case.product]
    found: dict[Key, Kernel] = {}
    with collected(found, CARD, ""), torch.device("meta"):
        weight = packed(m * (1 + pair), k, *FORMATS[case.format], device="meta")
        x = torch.empty(case.rows, k, dtype=torch.bfloat16)
        rest = torch.empty(case.rows, m, dtype=torch.bfloat16) if case.product in ("o", "down") else None
        build_together(partial(one, case.product, x, weight, rest, case.tiles))
    (kernel,) = found.values()
    return kernel, weight.nbytes


def loop_of(kernel: Kernel) -> int:
    """Instructions of the loop of a kernel, those between a label and a branch back to it: the shortest with wgmma."""
    binary = triton.compile(kernel.source, target=target_of(kernel.card), options=kernel.options)
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        said = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True)
    labels: dict[str, int] = {}
    products: list[int] = []  # where wgmma instructions are
    loops: list[int] = []
    count = 0
    for line in said.stdout.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif instruction := re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?) ;", line):
            count += 1
            if "GMMA" in instruction[1]:
                products.append(count)
            if (branch := re.search(r"BRA.*(\.L_x_\d+)", instruction[1])) and branch[1] in labels:
                start = labels[branch[1]]
                if products and products[-1] > start:
                    loops.append(count - start)
    return min(loops)


def cases(formats: Sequence[str], rows: int) -> list[Case]:
    with instead_of_a_gpu(CARD):
        return [
            Case(name, product, config, rows)
            for name in formats
            for product in LLAMA
            for config in candidates(product, FORMATS[name][0], rows)
            if isinstance(config, Tiles)
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--only", default=",".join(FORMATS))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        for line in pool.map(describe, cases(given.only.split(","), given.rows)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
