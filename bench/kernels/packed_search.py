"""Configurations of products with packed weights on a GPU, beside each other: `python -m bench.kernels.packed_search`

The four products of a layer of llama-3.1-8b, each alone, over weights that together do not fit L2. All kernels are
built first, many at a time. Prints the fastest configurations of each product, the error of the best against the dense
weight, and the sum of the best.

    --rows 1,32   numbers of vectors        --only int4,int8,fp8   formats
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.kernels.packed import FORMATS, LLAMA, error, one, packed
from bench.kernels.products import BF16, CUDA
from bench.kernels.timing import microseconds, read_speed
from lamina.kernels.gemm.product import ProductConfig, Rows, Tiles, parts_of
from lamina.kernels.limits import limits_of
from lamina.kernels.packed.matrix import SPANS, Kind, PackedMatrix
from lamina.kernels.packed.product import choose, tile_bytes
from lamina.kernels.workspace import COUNTERS, PARTS, scratch
from lamina.runtime.builders import build_together

SHAPES = (  # of `Tiles`; `packed_tiles` shows what each takes of an SM
    (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 256, 4, 2), (64, 256, 4, 3), (64, 256, 4, 4),
    (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (128, 256, 8, 3), (128, 256, 8, 4),
)  # fmt: skip
PAIRS = ((64, 128, 8, 4), (64, 256, 8, 2), (64, 256, 8, 3))  # four warps for gate, four for up
COPIES = (dict(), dict(apart=True), dict(apart=True, bulk=True))
PROGRAMS = range(110, 560)
SHOWN = 5


def candidates(name: str, kind: Kind, n: int) -> list[ProductConfig]:
    """Configurations of one product, that of `choose` first."""
    m, k, pair = LLAMA[name]
    limits, span = limits_of(CUDA), SPANS[kind]
    found: list[ProductConfig] = [choose(n, m, k, kind, pair, limits)]
    if n == 1:
        for warps in (2, 4):
            block = 32 * span * warps
            for rows in (2, 4) if pair else (4, 8):
                for held in (1, 2) if k <= 2 * block else (2, 3):
                    if k % block == 0:
                        found.append(Rows(rows, block, warps, held=held, unroll=1 if held * block >= k else 2))
        return [*dict.fromkeys(found)]
    for rows, block, warps, stages in SHAPES + PAIRS if pair else SHAPES:
        for splits in (1, 2, 4, 8):
            config = Tiles(rows, block, warps, stages, splits)
            counters, parts = parts_of(config, n, m)
            fits = splits == 1 or (counters <= COUNTERS and parts <= PARTS)
            fits = fits and tile_bytes(config, n, kind, pair, limits) <= limits.shared
            if fits and -(-m // rows) * splits in PROGRAMS:
                found += [replace(config, **how) for how in COPIES]
    return [*dict.fromkeys(found)]


def search(name: str, n: int, limit: float) -> None:
    kind, group = FORMATS[name]
    began = time.time()
    weights: dict[str, list[PackedMatrix]] = {}
    given: dict[str, tuple[Tensor, Tensor | None]] = {}
    for what, (m, k, pair) in LLAMA.items():
        weights[what] = [packed(m * (1 + pair), k, kind, group) for _ in range(3)]
        rest = torch.randn(n, m, device=CUDA).to(BF16) if what in ("o", "down") else None
        given[what] = (torch.randn(n, k, device=CUDA).to(BF16), rest)
    tried = [(what, config) for what in LLAMA for config in candidates(what, kind, n)]

    def call(what: str, config: ProductConfig, i: int = 0) -> Tensor:
        x, rest = given[what]
        return one(what, x, weights[what][i], rest, config)

    build_together(*(partial(call, what, config) for what, config in tried))
    print(f"{name}, {n} rows: {len(tried)} kernels built in {time.time() - began:.0f} s", flush=True)
    total = 0.0
    for what in LLAMA:
        times = [
            (microseconds([partial(call, what, config, i) for i in range(3)] * 4, repeats=3), config)
            for one_of, config in tried
            if one_of == what
        ]
        chosen = times[0][1]
        times.sort(key=lambda pair: pair[0])
        total += times[0][0]
        x, rest = given[what]
        wrong = error(what, x, weights[what][0], rest, call(what, times[0][1]))
        share = weights[what][0].nbytes / times[0][0] / 1e6 / limit
        print(f"  {what}: {share:.0%} of the read bandwidth, error {wrong:.1e}", flush=True)
        for us, config in times[:SHOWN]:
            print(f"    {us:6.1f} µs {config}{' (chosen)' if config == chosen else ''}", flush=True)
    print(f"  sum of the best {total:.1f} µs", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--only", default=",".join(FORMATS))
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    limit = read_speed()
    scratch(torch.device("cuda", torch.cuda.current_device()))  # before threads ask for it
    for n in map(int, arguments.rows.split(",")):
        for name in arguments.only.split(","):
            search(name, n, limit)


if __name__ == "__main__":
    main()
