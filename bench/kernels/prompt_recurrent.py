"""SSD and the short convolution over prompts on a GPU: right, and how fast: `python -m bench.kernels.prompt_recurrent`

Each line is a shape, a way, its milliseconds, and the errors of outputs and new states beside those of the same
computation in float64, as a share of the largest value. Then the milliseconds of each launch of ours. With "tiles"
as an argument, our kernels also run with other tiles than their own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.kernels.timing import all_at_once, microseconds
from lamina.kernels.limits import limits_of
from lamina.kernels.recurrent.prompt.conv import conv_prompt
from lamina.kernels.recurrent.prompt.ssd import Tile, ssd_prompt, tile_for
from lamina.recurrence import SSD, causal_convolution

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
MAMBA, FALCON, NEMOTRON = SSD(80, 64, 128, groups=1), SSD(24, 128, 256, groups=1), SSD(128, 64, 128, groups=8)
RAGGED = tuple(100 + 924 * i // 63 for i in range(64))
TAPS = 4
TIMES = 2.5  # the error of the plain computation; tests, which have fewer values, allow 2
CONV_TILES = [(64, 128, 4), (32, 256, 4), (64, 64, 4), (16, 256, 4), (32, 64, 2), (128, 64, 4)]

Way = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Shape:
    name: str
    rule: SSD
    tokens: int
    rows: tuple[int, ...] = ()  # lengths of ragged rows
    dtype: torch.dtype = BF16

    @property
    def counts(self) -> Tensor | None:
        return torch.tensor(self.rows, device=CUDA) if self.rows else None

    @property
    def valid(self) -> Tensor | None:
        counts = self.counts
        return None if counts is None else torch.arange(self.tokens, device=CUDA) < counts[:, None]


SHAPES = [
    Shape("mamba2-2.7b 8,192", MAMBA, 8192),
    Shape("mamba2-2.7b 512", MAMBA, 512),
    Shape("mamba2-2.7b 64 rows to 1,024", MAMBA, 1024, RAGGED),
    Shape("falcon-h1-7b 8,192", FALCON, 8192),
    Shape("falcon-h1-7b 512", FALCON, 512),
    Shape("nemotron-h 8,192", NEMOTRON, 8192),
    Shape("mamba2-2.7b 1,000 float32", MAMBA, 1000, dtype=torch.float32),
    Shape("mamba2-2.7b 1,000 float16", MAMBA, 1000, dtype=torch.float16),
]


def projected(shape: Shape) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """-> inputs as slices of one convolution's output, constants, state"""
    torch.manual_seed(0)
    rule, rows = shape.rule, len(shape.rows) or 1
    inner, shared = rule.heads * rule.head_dim, rule.groups * rule.state
    wide = torch.randn(rows, shape.tokens, inner + 2 * shared, device=CUDA).to(shape.dtype)
    parts = wide.split([inner, shared, shared], -1)
    dt = F.softplus(torch.randn(rows, shape.tokens, rule.heads, device=CUDA) - 3)
    inputs = {
        name: part.unflatten(-1, rule.input_shapes[name]) for name, part in zip(("x", "B", "C"), parts, strict=True)
    }
    constants = {"A": -(1 + 15 * torch.rand(rule.heads, device=CUDA))}
    return {**inputs, "dt": dt}, constants, torch.randn(rows, *rule.state_shape, device=CUDA)


def tiles_of(shape: Shape) -> Iterator[Tile]:
    rule = shape.rule
    own = tile_for(shape.tokens, rule.head_dim, rule.state, shape.dtype, limits_of(CUDA))
    if shape.dtype != BF16:
        return
    for chunk, warps, stages in ((64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 2), (32, 4, 2)):
        yield replace(own, chunk=chunk, warps=warps, stages=stages)
    for heads in (1, 2, 4, 16):
        yield replace(own, heads=heads)
    for side, warps, stages in (((64, 128), 4, 3), ((64, 128), 8, 3), ((64, 32), 4, 3), ((64, 64), 4, 4)):
        yield replace(own, state_tile=side, state_warps=warps, state_stages=stages)


def recurrences(shape: Shape, tiles: bool) -> tuple[list[tuple[str, Way]], Way]:
    """-> ways by name, and that of float64"""
    inputs, constants, state = projected(shape)
    rule, counts, valid = shape.rule, shape.counts, shape.valid
    ours = partial(ssd_prompt, rule, state, inputs, constants, counts)
    ways: list[tuple[str, Way]] = [("ours", ours), ("plain", partial(rule.chunk, state, inputs, constants, valid))]
    if tiles:
        ways += [(str(tile), partial(ours, tile=tile)) for tile in tiles_of(shape)]

    def truth() -> tuple[Tensor, ...]:
        wide = ({name: x.double() for name, x in some.items()} for some in (inputs, constants))
        return rule.chunk(state.double(), *wide, valid)

    return ways, truth


def convolutions(shape: Shape, tiles: bool) -> tuple[list[tuple[str, Way]], Way]:
    torch.manual_seed(0)
    rule, rows = shape.rule, len(shape.rows) or 1
    channels = rule.heads * rule.head_dim + 2 * rule.groups * rule.state
    past, x = (torch.randn(rows, n, channels + 512, device=CUDA).to(shape.dtype) for n in (TAPS - 1, shape.tokens))
    past, x = past[..., 256:-256], x[..., 256:-256]
    weight, bias = (torch.randn(*s, device=CUDA).to(shape.dtype) for s in ((channels, TAPS), (channels,)))
    counts, valid = shape.counts, shape.valid

    def ours(tile: tuple[int, int, int] | None = None) -> tuple[Tensor, ...]:
        return (conv_prompt(past, x, weight, bias, "silu", counts, tile=tile),)

    def plain(dtype: torch.dtype = shape.dtype) -> tuple[Tensor, ...]:
        y = F.silu(causal_convolution(*(one.to(dtype) for one in (past, x, weight, bias))))
        return (y if valid is None else y.masked_fill(~valid[..., None], 0),)

    ways: list[tuple[str, Way]] = [("ours", ours), ("plain", plain)]
    if tiles:
        ways += [(f"{tile}", partial(ours, tile)) for tile in CONV_TILES]
    return ways, partial(plain, torch.float64)


def milliseconds(way: Way, host: bool) -> float:
    """Of the GPU alone, or with the host's time where that is more."""
    if not host:
        return microseconds([way] * 4) / 1000
    way()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    way()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def error(found: Tensor, truth: Tensor) -> float:
    """The largest error, as a share of the largest value; row by row, for memory."""
    if not found.isfinite().all():
        return float("inf")
    worst = max(float((a.double() - b).abs().max()) for a, b in zip(found, truth, strict=True))
    return worst / float(truth.abs().max())


def launches(way: Way) -> str:
    """The milliseconds of each of a way's kernels, by the profiler."""
    way()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        way()
        torch.cuda.synchronize()
    return ", ".join(f"{one.key[:40]} {one.device_time_total / 1000:.3f}" for one in profiler.key_averages())


def main(tiles: bool) -> bool:
    """Whether every result is as exact as it should be."""
    began, good = time.perf_counter(), True
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n")
    print("| shape | way | ms | error | of states |\n|---|---|---|---|---|")
    for shape in SHAPES:
        for kind, made in (("SSD", recurrences), ("conv", convolutions)):
            ways, true = made(shape, tiles)
            all_at_once([way for name, way in ways if name != "plain"])
            truth = true()
            limits = [TIMES * error(one, right) for one, right in zip(ways[1][1](), truth, strict=True)]
            for name, way in ways:
                told = f"| {kind} {shape.name} | {name} |"
                try:
                    errors = [error(one, right) for one, right in zip(way(), truth, strict=True)]
                    ms = milliseconds(way, name == "plain")
                except Exception as failure:
                    good &= name != "ours"
                    print(f"{told} {type(failure).__name__}: {str(failure)[:120]} | | |", flush=True)
                    continue
                # Operands of the states' products are rounded once, which the plain computation does not do.
                rounded = torch.finfo(shape.dtype).eps / 2 + 1e-5
                right = errors[0] <= limits[0] + 1e-5 and all(one <= rounded for one in errors[1:])
                good &= right
                said = " | ".join(f"{one:.1e}" for one in errors) + (" |" if len(errors) == 1 else "")
                print(f"{told} {ms:.3f} | {said} |{'' if right else ' WRONG'}", flush=True)
            print(f"| {kind} {shape.name} | {launches(ways[0][1])} | | | |", flush=True)
            del ways, true, truth
            torch.cuda.empty_cache()
    print(f"\n{'all right' if good else 'WRONG'}, {time.perf_counter() - began:.0f} s")
    return good


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:] == ["tiles"]))
