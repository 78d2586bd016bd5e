"""Mixtures of experts on a GPU: are they right, and how near the bandwidth? `python -m bench.kernels.experts`

First the kernels against float64, with every share that is tried (the error may be twice that of PyTorch in the same
dtype). Then the time of each launch alone, and of whole mixtures in a row, each a norm, the router and two launches for
the experts: what a kernel asks for before the one in front has finished shows only there. 1, 8 and 32 tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.kernels.timing import all_at_once, microseconds, read_speed
from lamina.kernels.gemm.experts import Share, expert_down, expert_gated
from lamina.kernels.gemm.router import route
from lamina.kernels.norm import rms_norm
from lamina.kernels.workspace import scratch
from lamina.nn import Choice, Mixture

BF16 = torch.bfloat16
TOKENS = (1, 8, 32)
LAYERS = 4  # whose weights are read in turn: together, those of the shared experts too, more than L2 holds
ROUNDS = 4

Shares = tuple[Share | None, Share | None]  # of expert_gated and of expert_down; None: the one that is chosen
GATED = [
    Share(2, 1024, 4, early=False), Share(1, 2048, 4), Share(2, 2048, 4), Share(2, 2048, 8), Share(4, 1024, 4),
    Share(1, 1024, 4),
]  # fmt: skip
DOWN = [
    Share(1, 512, 2, early=False), Share(2, 512, 2), Share(2, 512, 2, early=False), Share(1, 512, 1),
    Share(1, 1024, 4), Share(2, 1024, 4),
]  # fmt: skip
SHARES: list[Shares] = [(None, None), *((gated, None) for gated in GATED), *((None, down) for down in DOWN)]


@dataclass(frozen=True)
class Tiling:
    name: str
    width: int
    experts: int
    inner: int
    choice: Choice
    shared: int
    opens: bool = False
    exact: bool = False

    def mixture(self, experts: int) -> Mixture:
        """In bfloat16; the router in float32 where it is exact, and with a bias then."""
        with torch.device("cuda"):
            made = Mixture(
                self.width, experts, self.inner, "silu", self.choice, shared=self.shared, opens=self.opens,
                balanced=self.exact,
            ).requires_grad_(False)  # fmt: skip
        made.experts.to(BF16)
        made.shared.to(BF16)
        if not self.exact:
            made.router.to(BF16)
        if made.router.bias is not None:
            made.router.bias.normal_(0, 0.1)
        return made

    def bytes_read(self, visited: float) -> float:
        """Bytes of the weights of the visited experts and the shared one."""
        return 3 * self.width * (visited * self.inner + self.shared) * 2


SHAPES = [
    Tiling("qwen3-next", 2048, 512, 512, Choice(10, normed=True), shared=512, opens=True),
    Tiling("deepseek-v2-lite", 2048, 64, 1408, Choice(6, "sigmoid"), shared=2816, exact=True),
]
Routed = tuple[Tensor, Tensor, Tensor | None]


def routed(mixture: Mixture, x: Tensor) -> Routed:
    router = mixture.router
    return route(x, router.weight, router.choice, router.bias, opens=router.opens)


def run(mixture: Mixture, x: Tensor, onto: Tensor, shares: Shares, found: Routed | None = None) -> Tensor:
    """`Mixture.forward` with these shares, and with experts that were chosen before where they are given."""
    chosen, weights, opening = found or routed(mixture, x)
    experts, shared, (gated, down) = mixture.experts, mixture.shared, shares
    h = expert_gated(
        x, experts.gate_up, chosen, weights, "silu", shared=shared.gate_up.weight, opening=opening, share=gated
    )
    return expert_down(h, experts.down, chosen, shared=shared.down.weight, residual=onto, share=down)


def attempt(what: object, call: Callable[..., float], *args: object) -> float:
    """What a call gives; where it fails, a line that says so, infinity, and on with the next."""
    try:
        return call(*args)
    except Exception as error:
        print(f"  FAILED {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return float("inf")


# -- are they right? -----------------------------------------------------------------------------------------------


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).abs().max() / b.abs().max()).item()


def by_definition(mixture: Mixture, x: Tensor, onto: Tensor, found: Routed) -> Tensor:
    chosen, weights, opening = found
    shared = mixture.shared(x) if opening is None else opening.to(x.dtype) * mixture.shared(x)
    return onto + mixture.experts(x, chosen.long(), weights.to(x.dtype)) + shared


def check(shape: Tiling, n: int) -> float:
    """The part of the shares that give what they must."""
    mixture, high = shape.mixture(32), shape.mixture(32).double()
    high.load_state_dict(mixture.state_dict())
    x, onto = (torch.randn(n, shape.width, device="cuda", dtype=BF16) for _ in range(2))
    found, expected = routed(mixture, x), high.router(x.double())
    elsewhere = int((found[0].sort(-1).values != expected[0].sort(-1).values).any(-1).sum())
    print(f"{shape.name}, {n} tokens: {elsewhere} at a near-tie went to other experts than in float64", flush=True)
    plain = by_definition(mixture, x, onto, found)
    exact = by_definition(high, x.double(), onto.double(), found)
    allowed = 2 * max(relative(plain, exact), torch.finfo(BF16).eps / 2)
    good = 0
    for shares in SHARES:
        error = attempt(shares, lambda s: relative(run(mixture, x, onto, s, found), exact), shares)
        good += error <= allowed
        if error > allowed:
            print(f"  FAILED {shares}: error {error:.1e}, allowed {allowed:.1e}", flush=True)
    print(f"{shape.name}, {n} tokens: {good} of {len(SHARES)} OK", flush=True)
    return good / len(SHARES)


# -- how fast? -----------------------------------------------------------------------------------------------------


def line(us: float, size: float, limit: float, what: object) -> None:
    print(f"  {us:8.2f} µs  {size / us / 1e6:5.2f} TB/s  {size / us / 1e6 / limit:4.0%}  {what}", flush=True)


def time_alone(shape: Tiling, layers: list[Mixture], n: int, limit: float) -> float:
    """Each launch by itself, again and again over layers, every time with other experts -> all three"""
    x = torch.randn(n, shape.width, device="cuda", dtype=BF16)
    h = torch.randn(n, shape.choice.each * shape.inner + shape.shared, device="cuda", dtype=BF16)
    weights = torch.rand(n, shape.choice.each, device="cuda")
    opening = torch.rand(n, 1, device="cuda") if shape.opens else None
    picked = [shape.choice.of(torch.randn(n, shape.experts, device="cuda"))[0].int() for _ in range(24)]
    turns = list(zip(picked, itertools.cycle(layers), strict=False))
    size = shape.bytes_read(sum(one.unique().numel() for one in picked) / len(picked))
    gated = [
        partial(
            expert_gated, x, one.experts.gate_up, chosen, weights, "silu", shared=one.shared.gate_up.weight,
            opening=opening,
        )
        for chosen, one in turns
    ]  # fmt: skip
    down = [
        partial(expert_down, h, one.experts.down, chosen, shared=one.shared.down.weight, residual=x)
        for chosen, one in turns
    ]
    router = [partial(routed, one, x) for _, one in turns]
    total = 0.0
    for what, calls, read in (
        ("route", router, layers[0].router.weight.nbytes),
        ("expert_gated", gated, size * 2 / 3),
        ("expert_down", down, size / 3),
    ):
        us = attempt(what, microseconds, calls)
        line(us, read, limit, what)
        total += us
    return total


def time_together(shape: Tiling, layers: list[Mixture], n: int, limit: float) -> float:
    """Whole mixtures one after the other, as in a model; the share counts the weights of experts alone -> the best"""
    start = torch.randn(n, shape.width, device="cuda", dtype=BF16)
    factor = torch.ones(shape.width, device="cuda", dtype=BF16)
    visited: list[int] = []

    def step(shares: Shares, counting: bool = False) -> Tensor:
        x = start
        for layer in layers * ROUNDS:
            y = rms_norm(x, factor, 1e-5)
            if counting:
                visited.append(routed(layer, y)[0].unique().numel())
            x = run(layer, y, x, shares)
        return x

    def mixture_time(shares: Shares) -> float:
        us = attempt(shares, microseconds, [partial(step, shares)]) / (ROUNDS * LAYERS)
        line(us, size, limit, " | ".join("chosen" if one is None else str(one) for one in shares))
        return us

    step((None, None), counting=True)
    size = shape.bytes_read(sum(visited) / len(visited))
    print(f"  a norm and a mixture, {sum(visited) / len(visited):.1f} experts, {size / 1e6:.1f} MB", flush=True)
    found = {shares: mixture_time(shares) for shares in SHARES}
    best = tuple(min(SHARES, key=lambda s: found[s] if s[1 - i] is None else float("inf"))[i] for i in range(2))
    return min([*found.values(), mixture_time((best[0], best[1]))])


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    limit = read_speed()
    scratch(torch.device("cuda", torch.cuda.current_device()))  # before threads ask for it
    for shape in SHAPES:
        began, small = time.perf_counter(), shape.mixture(32)
        x = {n: torch.randn(n, shape.width, device="cuda", dtype=BF16) for n in TOKENS}
        all_at_once([partial(run, small, x[n], x[n], shares) for n in TOKENS for shares in SHARES])
        print(f"\n{shape.name}: kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
        for n in TOKENS:
            attempt(f"{n} tokens", check, shape, n)
        layers = [shape.mixture(shape.experts) for _ in range(LAYERS)]
        for n in TOKENS:
            print(f"\n{shape.name}: {n} tokens × {shape.choice.each} of {shape.experts}", flush=True)
            attempt("alone", time_alone, shape, layers, n, limit)
            attempt("together", time_together, shape, layers, n, limit)


if __name__ == "__main__":
    main()
