"""Products with packed weights on a GPU: are they right, and how near the bandwidth? `python -m bench.kernels.packed`

First whole decode steps of llama-3.1-8b with 1 and 32 rows; then its layers one after another, attention replaced by a
small kernel, in a few plans (configurations of the four products), with 32 rows and with one; then products with many
rows, by dequantizing the weight and by tiles of 64. Every product of a plan is compared with
the dense weight in float32 first. Every line is printed when it is known, and shares are of the read bandwidth, by the
bytes really read.

    --only int4,fp8   some formats        --no-steps   no whole models
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.products import BF16, CUDA, MATRICES
from bench.kernels.timing import all_at_once, microseconds, read_speed
from lamina.kernels.gemm.product import ProductConfig, Rows
from lamina.kernels.limits import limits_of
from lamina.kernels.norm import rms_norm
from lamina.kernels.packed.dequantize import dequantize
from lamina.kernels.packed.linear import many_product
from lamina.kernels.packed.matrix import SPANS, Kind, PackedMatrix
from lamina.kernels.packed.product import choose, packed_gated, packed_product
from lamina.kernels.workspace import scratch

FORMATS: dict[str, tuple[Kind, int]] = {"int4": ("int4", 32), "int8": ("int8", 32), "fp8": ("fp8", 0)}
LLAMA = {name: matrix for name, matrix in MATRICES["llama-3.1-8b"].items() if name != "head"}
LAYERS = 6
STEPS = 100
Plan = dict[str, ProductConfig]


def plans(kind: Kind, n: int) -> dict[str, Plan]:
    """Configurations of qkv, o, gate_up and down."""
    chosen = {name: choose(n, m, k, kind, pair, limits_of(CUDA)) for name, (m, k, pair) in LLAMA.items()}
    if n > 1:  # others: packed_search.py
        return {"chosen": chosen}
    each = 32 * SPANS[kind]  # values of a row that a warp owns
    early = {name: replace(one, early=True) for name, one in chosen.items()}  # type: ignore[call-arg]
    if kind == "int4":
        return {
            "chosen": chosen,
            "early": early,
            "4 warps": plan(Rows(8, 4 * each, 4, held=1), Rows(8, 2 * each, 2, held=2, unroll=2)),
            "16 rows": plan(Rows(16, 4 * each, 4, held=1), Rows(8, each, 1, 2, held=2, unroll=2)),
        }
    return {
        "chosen": chosen,
        "early": early,
        "4 rows": plan(Rows(4, 4 * each, 4, held=2), Rows(4, 4 * each, 4, held=3, unroll=2)),
    }


def plan(narrow: Rows, down: Rows) -> Plan:
    return {"qkv": narrow, "o": narrow, "gate_up": replace(narrow, rows=narrow.rows // 2), "down": down}


def packed(m: int, k: int, kind: Kind, group: int, device: torch.device | str = CUDA) -> PackedMatrix:
    """Random codes, with scales for values of about k^-0.5."""
    group, four, size = group or k, SPANS[kind] == 32, k**-0.5
    codes = torch.randint(0, 256, (m, k // 2 if four else k), dtype=torch.uint8, device=device)
    scales = (torch.rand(m, k // group, device=device) + 0.5) * size
    if kind == "fp8":
        return PackedMatrix(kind, torch.where(codes & 127 > 120, codes & 128, codes), scales / 64, group)
    zeros = torch.randint(6, 10, scales.shape, dtype=torch.uint8, device=device) if four else None
    return PackedMatrix(kind, codes, (scales / (4 if four else 64)).half(), group, zeros)


def one(name: str, x: Tensor, weight: PackedMatrix, rest: Tensor | None, config: ProductConfig | None) -> Tensor:
    if name == "gate_up":
        return packed_gated(x, weight, "silu", config=config)
    return packed_product(x, weight, residual=rest, config=config)


def error(name: str, x: Tensor, weight: PackedMatrix, rest: Tensor | None, got: Tensor) -> float:
    """The largest difference from the product with the dense weight, of the largest result."""
    y = F.linear(x.float(), weight.dense(torch.float32))
    if name == "gate_up":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    y = y if rest is None else y + rest.float()
    return ((got.float() - y).abs().max() / y.abs().max()).item()


def time_layers(name: str, n: int, limit: float) -> None:
    kind, group = FORMATS[name]
    weights = [
        {what: packed(m * (1 + pair), k, kind, group) for what, (m, k, pair) in LLAMA.items()} for _ in range(LAYERS)
    ]
    size = sum(one.nbytes for one in weights[0].values())
    factor = torch.ones(4096, device=CUDA, dtype=BF16)
    start = torch.randn(n, 4096, device=CUDA).to(BF16)
    wide = torch.randn(n, 14336, device=CUDA).to(BF16)
    inputs = {"qkv": start, "o": start, "gate_up": start, "down": wide}
    rests = {"qkv": None, "o": start, "gate_up": None, "down": start}

    def run(plan: Plan) -> Tensor:
        x = start
        for layer in weights:
            y = one("qkv", rms_norm(x, factor, 1e-5), layer["qkv"], None, plan["qkv"])
            x = one("o", rms_norm(y[:, :4096], factor, 1e-5), layer["o"], x, plan["o"])
            h = one("gate_up", rms_norm(x, factor, 1e-5), layer["gate_up"], None, plan["gate_up"])
            x = one("down", h, layer["down"], x, plan["down"])
        return x

    began = time.time()
    tried = plans(kind, n)
    jobs = {
        (what, config): partial(one, what, inputs[what], weights[0][what], rests[what], config)
        for plan in tried.values()
        for what, config in plan.items()
    }
    failed = dict(zip(jobs, all_at_once([*jobs.values()]), strict=True))
    print(f"{name}, {n} rows: {len(jobs)} kernels built in {time.time() - began:.0f} s", flush=True)
    for title, plan in tried.items():
        if bad := [f"{what} {config}: {failed[what, config]}" for what, config in plan.items() if failed[what, config]]:
            print(f"  {title}: FAILED {bad}", flush=True)
            continue
        cells = []
        for what, config in plan.items():
            wrong = error(what, inputs[what], weights[0][what], rests[what], jobs[what, config]())
            calls = [partial(one, what, inputs[what], layer[what], rests[what], config) for layer in weights] * 2
            us = microseconds(calls, repeats=3)
            share = weights[0][what].nbytes / us / 1e6 / limit
            cells.append(f"{what} {us:.1f} µs {share:.0%}{f' WRONG {wrong:.0e}' if wrong > 0.02 else ''}")
        us = microseconds([partial(run, plan)], repeats=3) / LAYERS
        print(f"  {title:16s} {us:7.2f} µs a layer, {size / us / 1e6 / limit:4.0%}: {', '.join(cells)}", flush=True)


def time_steps(name: str, counts: Sequence[int], limit: float) -> None:
    """Whole decode steps, captured, with a context of 128."""
    from lamina.bench.random_model import random_model
    from lamina.bench.subjects import Lamina
    from lamina.checkpoint.shapes import find_shape
    from lamina.runtime import why_not_captured

    began = time.time()
    subject = Lamina(random_model(find_shape("llama-3.1-8b").config, BF16, CUDA, weights=name))
    print(f"{name}: model of {subject.weights / 1e9:.2f} GB after {time.time() - began:.0f} s", flush=True)
    for n in counts:
        subject.open(n, 128, 4 * STEPS)
        if reason := why_not_captured(subject.model, subject.cache):
            print(f"  not captured: {reason}", flush=True)
        subject.run(STEPS)
        torch.cuda.synchronize()
        times = []
        for _ in range(3):
            subject.restart()
            start = time.perf_counter()
            subject.run(STEPS)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / STEPS)
        best = min(times)
        read = (subject.weights - embedding_bytes(subject.model)) / best / 1e12 / limit
        print(f"  {name}, {n} rows: {n / best:.0f} tok/s, {best * 1e3:.3f} ms a step, weights at {read:.0%}; "
              f"{time.time() - began:.0f} s", flush=True)  # fmt: skip
        subject.close()


def embedding_bytes(model: torch.nn.Module) -> int:
    """Of which a step reads a row for each token."""
    found = model.get_submodule("embedding").weight
    return int(found.nbytes)  # type: ignore[operator, arg-type]


def time_many(name: str) -> None:
    """Prefill of down, 4096 × 14336: plain bf16, a scratch weight and the library's product, and tiles of 64 rows."""
    m, k, _ = LLAMA["down"]
    plain, weight = torch.randn(m, k, device=CUDA).to(BF16), packed(m, k, *FORMATS[name])
    us = microseconds([partial(dequantize, weight, torch.empty_like(plain))] * 4)
    print(f"{name}, many rows: dequantize {us:.1f} µs ({(weight.nbytes + plain.nbytes) / us / 1e6:.2f} TB/s)")
    for n in (128, 256, 512, 2048):
        x = torch.randn(n, k, device=CUDA).to(BF16)
        ways: dict[str, Callable[[], object]] = {
            "plain": partial(F.linear, x, plain),
            "scratch": partial(many_product, x, weight),
            "tiles": lambda x=x: [packed_product(part, weight) for part in x.split(64)],
        }
        found = (f"{way} {microseconds([call] * 2):.0f}" for way, call in ways.items())
        print(f"  {n} rows: {', '.join(found)} µs", flush=True)


def main() -> None:
    faulthandler.dump_traceback_later(140)  # where it is, if it takes too long
    arguments = sys.argv[1:]
    only = arguments[arguments.index("--only") + 1].split(",") if "--only" in arguments else [*FORMATS]
    torch.backends.cuda.matmul.allow_tf32 = False
    limit = read_speed()
    scratch(torch.device("cuda", torch.cuda.current_device()))  # before threads ask for it
    if "--no-steps" not in arguments:
        for name in only:
            time_steps(name, (1, 32), limit)
    for n in (32, 1):
        for name in only:
            time_layers(name, n, limit)
    time_many(only[0])


if __name__ == "__main__":
    main()
