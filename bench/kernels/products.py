"""Products and norms on a GPU: are they right, and how near the bandwidth? `python -m bench.kernels.products`

First every form against float64 (the error may be twice that of PyTorch in the same dtype). Then the time of each form
for the matrices of an 8B llama and 1, 4 and 32 rows (`--all`: 1 to 64), norms and residuals as in the model; then whole
layers in a row, attention replaced by a small kernel, which shows how well a form hides its start.
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

from bench.kernels.timing import all_at_once, bandwidths, microseconds
from lamina.kernels.finish import scratch
from lamina.kernels.norm import gated_rms_norm, rms_norm
from lamina.kernels.product import Form, Norm, Rows, Sweep, Tiles, choose, gated, gated_product, linear, product
from lamina.nn import GatedRMSNorm

BF16 = torch.bfloat16
SHAPES = {  # outputs, sums over, gated
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (14336, 4096, True),
    "down": (4096, 14336, False),
    "head": (128256, 4096, False),
}
ROWS: list[Form] = [
    Rows(2, 1024, 4), Rows(2, 512, 2), Rows(1, 2048, 4), Rows(2, 1024, 4, unroll=4), Rows(2, 1024, 4, stages=4),
    Rows(2, 1024, 4, splits=2), Rows(2, 1024, 4, splits=4),
]  # fmt: skip
SWEEPS: list[Form] = [
    Sweep(2, 8, 4, 2), Sweep(2, 8, 5, 2), Sweep(1, 8, 6, 2), Sweep(1, 4, 5, 4), Sweep(2, 4, 4, 3), Sweep(2, 8, 3, 4),
    Sweep(4, 8, 4, 1), Sweep(2, 8, 4, 2, ahead=2),
]  # fmt: skip
WIDE_SWEEPS: list[Form] = [
    Sweep(1, 16, 4, 1), Sweep(1, 16, 6, 1), Sweep(2, 16, 3, 1), Sweep(1, 16, 3, 2), Sweep(1, 8, 4, 2),
]  # fmt: skip
TILES: list[Form] = [
    Tiles(128, 64, 4, 4), Tiles(64, 64, 4, 5), Tiles(64, 128, 4, 4), Tiles(128, 64, 4, 4, 4), Tiles(64, 128, 4, 4, 2),
    Tiles(64, 128, 4, 4, 4), Tiles(128, 64, 4, 5, 8), Tiles(128, 64, 4, 4, 1, True), Tiles(64, 128, 4, 4, 4, True),
    Tiles(32, 128, 4, 5),
]  # fmt: skip


def forms_for(name: str, n: int) -> list[Form]:
    """The forms worth trying; a gated program reads two rows of the weight for each of its own."""
    m, k, is_gated = SHAPES[name]
    sweeps = WIDE_SWEEPS if k > 8192 else SWEEPS
    found = [*ROWS, *sweeps] if n == 1 else [*ROWS[4:5], *(SWEEPS[:2] if k <= 8192 else [])] if n <= 4 else []
    found += TILES if n >= 4 else []
    if is_gated:
        found = [replace(f, rows=max(1, f.rows // 2)) for f in found]
    if m > 8192:
        found = [f for f in found if isinstance(f, Sweep) or f.splits == 1]
    return list(dict.fromkeys([choose(n, m, k, 2, is_gated), *found]))


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
    """Every form as it is used: with a norm, with a residual, gated with a norm."""
    cases: list[Case] = []
    for k in (4096, 14336):
        sweeps = WIDE_SWEEPS if k > 8192 else SWEEPS
        few = ROWS[4:5] if k > 8192 else [*ROWS[4:5], *SWEEPS[:2]]
        for n, forms in ((1, [*ROWS, *sweeps]), (4, [*few, *TILES]), (32, TILES)):
            cases += [case for form in forms for case in product_cases(form, n, k, BF16)]
        for n, form in ((1, Rows(1, 1024, 4, 2)), (1, sweeps[-1]), (3, Rows(1, 256, 4, 1, 1, 3)), (32, Tiles(64, 32))):
            cases += product_cases(form, n, k, torch.float32)
    started = time.perf_counter()
    failed = all_at_once([case[1] for case in cases])
    print(f"{len(cases)} kernels compiled in {time.perf_counter() - started:.1f} s", flush=True)
    good = 0
    for (what, got, plain, exact), error in zip(cases, failed, strict=True):
        if error:
            print(f"FAILED {what}: {error}", flush=True)
        else:
            good += report(what, got(), plain(), exact())
    print(f"products: {good} of {len(cases)} OK", flush=True)


def product_cases(form: Form, n: int, k: int, dtype: torch.dtype) -> list[Case]:
    """1040 outputs: no multiple of the larger forms' rows, but of 16, as in the model, so that kernels are shared."""
    torch.manual_seed(0)
    m, eps = 1040, 1e-5
    x, rest, factor = (torch.randn(*s, device="cuda", dtype=dtype) for s in ((n, k), (n, m), (k,)))
    weight = torch.randn(2 * m, k, device="cuda", dtype=dtype) * k**-0.5
    half, bias = weight[:m], torch.randn(m, device="cuda", dtype=dtype)
    norm = None if isinstance(form, Tiles) else Norm(factor, eps)

    def before(t: Tensor) -> Tensor:
        return t if norm is None else F.rms_norm(t, (k,), factor.to(t.dtype), eps)

    what = f"{form}, {n} × {k}, {str(dtype).removeprefix('torch.')}"
    cases: list[Case] = [
        (
            f"{what}, bias and scale",
            lambda: product(x, half, bias=bias, scale=0.5, form=form),
            lambda: linear(x, half, bias, scale=0.5),
            lambda: linear(x.double(), half.double(), bias.double(), scale=0.5),
        ),
        (
            f"{what}, norm",
            lambda: product(x, half, norm=norm, form=form),
            lambda: linear(before(x), half),
            lambda: linear(before(x.double()), half.double()),
        ),
        (
            f"{what}, residual",
            lambda: product(x, half, residual=rest, form=form),
            lambda: linear(x, half, residual=rest),
            lambda: linear(x.double(), half.double(), residual=rest.double()),
        ),
        (
            f"{what}, gated",
            lambda: gated_product(x, weight, "silu", norm=norm, form=form),
            lambda: gated(before(x), weight, "silu"),
            lambda: gated(before(x.double()), weight.double(), "silu"),
        ),
    ]
    if isinstance(form, Sweep) and k > 8192:
        cases.pop()  # two rows of that width at a time leave no room for stages
    return cases if dtype == torch.float32 else cases[1:]


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


def time_products(counts: Iterable[int], limit: float) -> None:
    for name, (m, k, is_gated) in SHAPES.items():
        rows = m * (1 + is_gated)
        size = rows * k * 2
        weights = [
            torch.randn(rows, k, device="cuda", dtype=BF16) * k**-0.5 for _ in range(max(2, (400 << 20) // size))
        ]
        factor = torch.ones(k, device="cuda", dtype=BF16)
        for n in counts:
            x = torch.randn(n, k, device="cuda", dtype=BF16)
            rest = torch.randn(n, m, device="cuda", dtype=BF16) if name in ("o", "down") else None

            def one(weight: Tensor, form: Form, x: Tensor, rest: Tensor | None, factor: Tensor, pair: bool) -> Tensor:
                norm = None if isinstance(form, Tiles) or rest is not None else Norm(factor, 1e-5)
                if pair:
                    return gated_product(x, weight, "silu", norm=norm, form=form)
                return product(x, weight, residual=rest, norm=norm, form=form)

            forms = forms_for(name, n)
            others = (x, rest, factor, is_gated)
            errors = all_at_once([partial(one, weights[0], form, *others) for form in forms])
            found = [(microseconds([partial(F.linear, x, w) for w in weights] * 2), "F.linear, nothing else")]
            for form, error in zip(forms, errors, strict=True):
                if error:
                    print(f"  FAILED {form}: {error}", flush=True)
                else:
                    us = microseconds([partial(one, w, form, *others) for w in weights] * 2)
                    found.append((us, f"{form}{'  <- chosen' if form == choose(n, m, k, 2, is_gated) else ''}"))
            print(f"\n{name}: {n} × [{rows}, {k}], {size / 1e6:.1f} MB", flush=True)
            for us, what in sorted(found):
                print(
                    f"  {us:8.2f} µs  {size / us / 1e6:5.2f} TB/s  {size / us / 1e6 / limit:4.0%}  {what}", flush=True
                )
        del weights


def time_layers(limit: float, n: int = 1, layers: int = 6) -> None:
    """Layers in a row: norm, qkv, a small kernel, o, norm, gate_up, down. The share counts weights only."""
    blocks = []
    for _ in range(layers):
        shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
        blocks.append([torch.randn(*s, device="cuda", dtype=BF16) * s[1] ** -0.5 for s in shapes])
    factor = torch.ones(4096, device="cuda", dtype=BF16)
    start = torch.randn(n, 4096, device="cuda", dtype=BF16)
    size = sum(w.numel() * 2 for block in blocks for w in block)

    def run(forms: dict[str, Form | None], fused: bool) -> Tensor:
        x = start
        for qkv, o, gate_up, down in blocks:
            norm = Norm(factor, 1e-5) if fused else None
            y = product(x if fused else rms_norm(x, factor, 1e-5), qkv, norm=norm, form=forms["qkv"])
            x = product(rms_norm(y[:, :4096], factor, 1e-5), o, residual=x, form=forms["o"])
            z = x if fused else rms_norm(x, factor, 1e-5)
            h = gated_product(z, gate_up, "silu", norm=norm, form=forms["gate_up"])
            x = product(h, down, residual=x, form=forms["down"])
        return x

    def same(narrow: Form | None, gate: Form | None, wide: Form | None) -> dict[str, Form | None]:
        return {"qkv": narrow, "o": narrow, "gate_up": gate, "down": wide}

    plans: dict[str, tuple[dict[str, Form | None], bool]] = {
        "chosen, norm apart": (same(None, None, None), False),
        "chosen, norm inside": (same(None, None, None), True),
    }
    if n == 1:
        narrow = Rows(2, 1024, 4)
        plans["rows, norm apart"] = (same(narrow, Rows(1, 1024, 4), narrow), False)
        plans["rows, norm inside"] = (same(narrow, Rows(1, 1024, 4), narrow), True)
        for ahead in (0, 1, 2, 4):
            for stages in (4, 5):
                sweep = same(
                    Sweep(2, 8, stages, 2, ahead), Sweep(1, 8, stages, 2, ahead), Sweep(1, 16, stages, 1, ahead)
                )
                plans[f"sweep, {stages} stages, {ahead} ahead, norm inside"] = (sweep, True)
        mixed = same(Sweep(2, 8, 4, 2, 1), Sweep(1, 8, 4, 2, 1), Rows(2, 1024, 4))
        plans["sweep, 1 ahead, down by rows, norm inside"] = (mixed, True)
        plans["sweep, 1 ahead, norm apart"] = (
            same(Sweep(2, 8, 4, 2, 1), Sweep(1, 8, 4, 2, 1), Sweep(1, 16, 4, 1, 1)),
            False,
        )
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
        print(f"rms_norm {n} × 4096: {ours:.2f} µs, PyTorch {theirs:.2f} µs", flush=True)


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    copied, read = bandwidths()
    limit = max(copied, read)
    print(f"{torch.cuda.get_device_name()}: copy {copied:.2f} TB/s, read {read:.2f} TB/s; shares are of {limit:.2f}")
    scratch(torch.device("cuda", torch.cuda.current_device()))  # before threads ask for it
    check_products()
    check_others()
    time_products((1, 2, 4, 8, 16, 32, 64) if "--all" in sys.argv else (1, 4, 32), limit)
    time_layers(limit)
    time_layers(limit, 32)
    time_norms()


if __name__ == "__main__":
    main()
