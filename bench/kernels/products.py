"""Products and norms on a GPU: are they right, and how near the bandwidth? `python -m bench.kernels.products`

First every config against float64 (the error may be twice that of PyTorch in the same dtype). Then each config's time
for the matrices of a model (an 8B llama, or the one of `MATRICES` that is named) and 1, 4 and 32 rows (`--all`: 1 to
64), residuals as in the model; then whole layers in a row, attention replaced by a small kernel, which shows how well a
config hides its start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import all_at_once, microseconds, read_speed
from lamina.kernels.gemm.product import ProductConfig, Rows, Tiles, choose, gated, gated_product, linear, product
from lamina.kernels.limits import limits_of
from lamina.kernels.norm import gated_rms_norm, rms_norm, rms_norm_twice
from lamina.kernels.workspace import scratch
from lamina.nn import GatedRMSNorm

BF16, CUDA = torch.bfloat16, torch.device("cuda")
TOO_LARGE = "OutOfResources"  # a config for a device with more room
Matrix = tuple[int, int, bool]  # outputs, sums over, gated
MATRICES: dict[str, dict[str, Matrix]] = {
    "llama-3.1-8b": {
        "qkv": (6144, 4096, False), "o": (4096, 4096, False), "gate_up": (14336, 4096, True),
        "down": (4096, 14336, False), "head": (128256, 4096, False),
    },
    "gemma-2-9b": {
        "qkv": (8192, 3584, False), "o": (3584, 4096, False), "gate_up": (14336, 3584, True),
        "down": (3584, 14336, False), "head": (256000, 3584, False),
    },
    "falcon-h1-7b": {
        "qkv": (2048, 3072, False), "o": (3072, 1536, False), "gate_up": (12288, 3072, True),
        "down": (3072, 12288, False), "head": (130048, 3072, False), "mamba in": (6680, 3072, False),
        "mamba out": (3072, 3072, False),
    },
}  # fmt: skip
ROWS: list[ProductConfig] = [
    Rows(2, 1024, 4), Rows(2, 512, 2), Rows(1, 2048, 4), Rows(2, 1024, 4, unroll=4), Rows(2, 512, 2, unroll=4),
    Rows(2, 1024, 4, splits=2), Rows(2, 1024, 4, splits=4),
]  # fmt: skip
TILES: list[ProductConfig] = [
    Tiles(64, 64, 4, 8), Tiles(64, 128, 4, 4), Tiles(64, 128, 4, 6), Tiles(64, 128, 4, 4, 2), Tiles(64, 128, 4, 6, 2),
    Tiles(64, 128, 4, 4, 4), Tiles(128, 64, 4, 4), Tiles(128, 64, 4, 4, 4), Tiles(128, 128, 8, 4, 4),
    Tiles(32, 128, 4, 5),
]  # fmt: skip


def configs_for(m: int, k: int, is_gated: bool, n: int) -> list[ProductConfig]:
    """The configs worth trying; a gated program reads two rows of the weight for each of its own."""
    found = ROWS if n == 1 else TILES
    if is_gated:
        found = [replace(f, rows=max(1, f.rows // 2)) for f in found]
    if m > 8192:
        found = [f for f in found if f.splits == 1]
    return list(dict.fromkeys([choose(n, m, k, 2, is_gated, limits_of(CUDA)), *found]))


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).abs().max() / b.abs().max()).item()


def report(what: str, got: Tensor, plain: Tensor, exact: Tensor) -> bool:
    """One line when wrong: an error more than twice the plain one, or than a rounding."""
    error, allowed = relative(got, exact), relative(plain, exact)
    allowed = 2 * max(allowed, torch.finfo(got.dtype).eps * (2 if got.dtype == torch.float32 else 0.5))
    ok = bool(got.isfinite().all()) and error <= allowed
    if not ok:
        print(f"FAILED {what}: error {error:.1e}, allowed {allowed:.1e}", flush=True)
    return ok


Case = tuple[str, Callable[[], Tensor], Callable[[], Tensor], Callable[[], Tensor]]


def check_products() -> None:
    """Every config as it is used: with bias and factors, with a residual, gated."""
    cases: list[Case] = []
    for k in (4096, 14336):
        for n, configs in ((1, ROWS), (4, TILES), (32, TILES)):
            cases += [case for config in configs for case in product_cases(config, n, k, BF16)]
        for n, config in (
            (1, Rows(1, 1024, 4, 2)),
            (3, Tiles(64, 64)),
            (32, Tiles(64, 32)),
            (32, Tiles(64, 32, splits=4)),
        ):
            cases += product_cases(config, n, k, torch.float32)
    started = time.perf_counter()
    failed = all_at_once([case[1] for case in cases])
    print(f"{len(cases)} kernels compiled in {time.perf_counter() - started:.1f} s", flush=True)
    good = too_large = 0
    for (what, got, plain, exact), error in zip(cases, failed, strict=True):
        if TOO_LARGE in error:
            too_large += 1
        elif error:
            print(f"FAILED {what}: {error}", flush=True)
        else:
            good += report(what, got(), plain(), exact())
    print(f"products: {good} of {len(cases) - too_large} OK, {too_large} take more room than there is", flush=True)


def product_cases(config: ProductConfig, n: int, k: int, dtype: torch.dtype) -> list[Case]:
    """1040 outputs: no multiple of the larger configs' rows, but of 16, as in the model, so that kernels are shared."""
    torch.manual_seed(0)
    m = 1040
    x, rest = (torch.randn(*s, device="cuda", dtype=dtype) for s in ((n, k), (n, m)))
    weight = torch.randn(2 * m, k, device="cuda", dtype=dtype) * k**-0.5
    half, bias = weight[:m], torch.randn(m, device="cuda", dtype=dtype)
    each = torch.rand(m, device="cuda", dtype=dtype)
    what = f"{config}, {n} × {k}, {str(dtype).removeprefix('torch.')}"
    return [
        (
            f"{what}, bias and factors",
            lambda: product(x, half, bias=bias, before=0.5, scale=each, config=config),
            lambda: linear(x, half, bias, before=0.5, scale=each),
            lambda: linear(x.double(), half.double(), bias.double(), before=0.5, scale=each.double()),
        ),
        (
            f"{what}, softly capped",
            lambda: product(x, half, scale=5.0, softcap=4.0, config=config),
            lambda: linear(x, half, scale=5.0, softcap=4.0),
            lambda: linear(x.double(), half.double(), scale=5.0, softcap=4.0),
        ),
        (
            f"{what}, residual",
            lambda: product(x, half, residual=rest, config=config),
            lambda: linear(x, half, residual=rest),
            lambda: linear(x.double(), half.double(), residual=rest.double()),
        ),
        (
            f"{what}, gated",
            lambda: gated_product(x, weight, "silu", scale=0.8, config=config),
            lambda: gated(x, weight, "silu", scale=0.8),
            lambda: gated(x.double(), weight.double(), "silu", scale=0.8),
        ),
    ]


@torch.no_grad()
def check_others() -> None:
    good = total = 0
    for dtype in (BF16, torch.float32):
        x, scale = torch.randn(3, 4096, device="cuda", dtype=dtype), torch.rand(4096, device="cuda", dtype=dtype)
        exact = F.rms_norm(x.double(), (4096,), scale.double(), 1e-5)
        good += report(f"rms_norm {dtype}", rms_norm(x, scale, 1e-5), F.rms_norm(x, (4096,), scale, 1e-5), exact)
        norm = GatedRMSNorm(4096, 1e-5, groups=8).cuda().to(dtype)
        gate = torch.randn_like(x)
        got = gated_rms_norm(x.float(), gate, norm.weight, 1e-5, groups=8)
        exact = GatedRMSNorm(4096, 1e-5, groups=8).cuda().double()(x.double(), gate.double())
        good += report(f"gated_rms_norm {dtype}", got, norm(x.float(), gate), exact)
        total += 2
    print(f"norms: {good} of {total} OK", flush=True)


def time_products(matrices: dict[str, Matrix], counts: Iterable[int], limit: float) -> None:
    for name, (m, k, is_gated) in matrices.items():
        rows = m * (1 + is_gated)
        size = rows * k * 2
        weights = [
            torch.randn(rows, k, device="cuda", dtype=BF16) * k**-0.5 for _ in range(max(2, (400 << 20) // size))
        ]
        for n in counts:
            x = torch.randn(n, k, device="cuda", dtype=BF16)
            rest = torch.randn(n, m, device="cuda", dtype=BF16) if name in ("o", "down", "mamba out") else None

            def one(weight: Tensor, config: ProductConfig, x: Tensor, rest: Tensor | None, pair: bool) -> Tensor:
                if pair:
                    return gated_product(x, weight, "silu", config=config)
                return product(x, weight, residual=rest, config=config)

            configs, chosen = configs_for(m, k, is_gated, n), choose(n, m, k, 2, is_gated, limits_of(CUDA))
            others = (x, rest, is_gated)
            errors = all_at_once([partial(one, weights[0], config, *others) for config in configs])
            found = [(microseconds([partial(F.linear, x, w) for w in weights] * 2), "F.linear, nothing else")]
            for config, error in zip(configs, errors, strict=True):
                if TOO_LARGE in error:
                    continue
                if error:
                    print(f"  FAILED {config}: {error}", flush=True)
                else:
                    us = microseconds([partial(one, w, config, *others) for w in weights] * 2)
                    found.append((us, f"{config}{'  <- chosen' if config == chosen else ''}"))
            print(f"\n{name}: {n} × [{rows}, {k}], {size / 1e6:.1f} MB", flush=True)
            for us, what in sorted(found):
                print(
                    f"  {us:8.2f} µs  {size / us / 1e6:5.2f} TB/s  {size / us / 1e6 / limit:4.0%}  {what}", flush=True
                )
        del weights


def time_layers(matrices: dict[str, Matrix], limit: float, n: int = 1, layers: int = 6) -> None:
    """Layers in a row: norm, qkv, a small kernel, o, norm, gate_up, down. The share counts weights only."""
    shapes = [
        (m * (1 + is_gated), k) for m, k, is_gated in (matrices[name] for name in ("qkv", "o", "gate_up", "down"))
    ]
    width, heads = shapes[0][1], shapes[1][1]
    blocks = [[torch.randn(*s, device="cuda", dtype=BF16) * s[1] ** -0.5 for s in shapes] for _ in range(layers)]
    factor = torch.ones(max(width, heads), device="cuda", dtype=BF16)
    start = torch.randn(n, width, device="cuda", dtype=BF16)
    size = sum(w.numel() * 2 for block in blocks for w in block)

    def run(narrow: ProductConfig | None, gate: ProductConfig | None, wide: ProductConfig | None) -> Tensor:
        x = start
        for qkv, o, gate_up, down in blocks:
            y = product(rms_norm(x, factor, 1e-5), qkv, config=narrow)
            x = product(rms_norm(y[:, :heads], factor, 1e-5), o, residual=x, config=narrow)
            h = gated_product(rms_norm(x, factor, 1e-5), gate_up, "silu", config=gate)
            x = product(h, down, residual=x, config=wide)
        return x

    plans: dict[str, tuple[ProductConfig | None, ...]] = {"chosen": (None, None, None)}
    if n == 1:
        plans["rows"] = (Rows(2, 1024, 4), Rows(1, 1024, 4), Rows(2, 1024, 4))
        plans["rows, unrolled"] = (Rows(2, 1024, 4, unroll=4), Rows(1, 1024, 4, unroll=4), Rows(2, 1024, 4, unroll=4))
        plans["rows, narrow"] = (Rows(2, 512, 2), Rows(1, 512, 2), Rows(2, 512, 2))
    print(f"\n{layers} layers, {n} rows, {size / layers / 1e6:.1f} MB each", flush=True)
    errors = all_at_once([partial(run, *plan) for plan in plans.values()])
    for (name, plan), error in zip(plans.items(), errors, strict=True):
        if error:
            print(f"  FAILED {name}: {error}", flush=True)
            continue
        us = microseconds([partial(run, *plan)]) / layers
        print(f"  {us:8.2f} µs a layer  {size / layers / us / 1e6 / limit:6.1%}  {name}", flush=True)


def time_norms() -> None:
    x, scale = torch.randn(32, 4096, device="cuda", dtype=BF16), torch.ones(4096, device="cuda", dtype=BF16)
    for n in (1, 32):
        ours = microseconds([partial(rms_norm, x[:n], scale, 1e-5)] * 50)
        theirs = microseconds([partial(F.rms_norm, x[:n], (4096,), scale, 1e-5)] * 50)
        twice = microseconds([partial(rms_norm_twice, x[:n], x[:n], (scale, scale), (1e-5, 1e-5))] * 50)
        print(f"rms_norm {n} × 4096: {ours:.2f} µs, PyTorch {theirs:.2f} µs; with a second {twice:.2f} µs", flush=True)


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    limit = read_speed()
    scratch(torch.device("cuda", torch.cuda.current_device()))  # before threads ask for it
    check_products()
    check_others()
    matrices = MATRICES[next((name for name in sys.argv[1:] if name in MATRICES), "llama-3.1-8b")]
    time_products(matrices, (1, 2, 4, 8, 16, 32, 64) if "--all" in sys.argv else (1, 4, 32), limit)
    time_layers(matrices, limit)
    time_layers(matrices, limit, 32)
    time_norms()


if __name__ == "__main__":
    main()
