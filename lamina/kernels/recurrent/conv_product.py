"""The short convolution of one token and a product of its result in one launch, for few rows.

    x = act(convolve(x))        y = W x

Mamba-1 has this between its projections, and both move few bytes. A program computes a tile of the product, ROWS
outputs over BLOCK channels, and convolves these channels by itself: the programs of other outputs convolve them again,
which reads a few kilobytes from L2. It loads its tile of W, the ring and the taps before waiting for the launch in
front. The last program of a row of tiles adds up their parts (`gemm/epilogue.py`).

The programs of the first outputs store x and the ring's new slot, which is none of those that are read (`mixer.py`).
A row without a token stores nothing in the ring, and x = 0, y = 0. Reference: `convolve_step`, then `product`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from lamina.kernels.entry import COUNTS, count_of
from lamina.kernels.gemm.epilogue import arrive
from lamina.kernels.launch import begin_together, launch
from lamina.kernels.recurrent.conv import ring_of
from lamina.kernels.recurrent.mixer_stages import act_of, contiguous_rows, convolve_history, convolve_new
from lamina.kernels.workspace import COUNTERS, PARTS, scratch

if TYPE_CHECKING:
    from lamina.nn.recurrent.short_conv import ShortConvolution

FEW = 2  # rows for which reading W once a row is faster than a launch
MOST_OUTPUTS = 1024  # beyond, the convolution would be repeated too often
TILE = (8, 512, 4)  # outputs, channels, warps of a program


@triton.jit
def _convolve_product(
    x, taps, bias, weight,  # [R, C] for R rows, [C, K], [C] or None, [M, C]
    out, y, table,  # [R, C], [R, M]; the entry's table row, whose store is the ring [R, S, C]
    parts, arrived,  # [R, M, C / BLOCK] float32, [R · M / ROWS] int32 counters, zero between launches
    x_row, weight_row,  # strides
    M, C: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, S_BLOCK: tl.constexpr, PDL: tl.constexpr,  # SPLITS: tiles over all channels
):  # fmt: skip
    """Program (i, s, row): outputs i · ROWS …, summed over the channels s · BLOCK … of one row."""
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    m, c = group * ROWS + tl.arange(0, ROWS), split * BLOCK + tl.arange(0, BLOCK)
    c_mask, keep = c < C, m < M
    at = weight + tl.minimum(m, M - 1)[:, None] * weight_row + c[None, :]
    w = tl.load(at, mask=c_mask[None, :], other=0.0)  # [ROWS, BLOCK]
    counts = tl.load(table + COUNTS)
    ring, size, length = ring_of(table, row, C, x.dtype.element_ty)
    real = count_of(counts, row, 1) > 0
    total, tap = convolve_history(ring, size, length, taps, bias, c, c_mask, C, K)
    begin_together(PDL)  # the scan that follows reads its state and weights before it waits, which nothing here writes
    new = tl.load(x + row * x_row + c, mask=c_mask, other=0.0)
    v = tl.where(real, convolve_new(total, tap, new, c_mask, ACT), 0.0).to(x.dtype.element_ty)
    part = tl.sum(w.to(tl.float32) * v.to(tl.float32)[None, :], axis=1)  # [ROWS]
    tl.store(parts + (row * M + m) * SPLITS + split, part, mask=keep)
    last = arrive(arrived, row * tl.num_programs(0) + group, SPLITS)
    if group == 0:
        tl.store(out + row * C + c, v, mask=c_mask)
        tl.store(ring + length % size * C + c, new, mask=c_mask & real)
    if last:
        s = tl.arange(0, S_BLOCK)
        every = (row * M + m[:, None]) * SPLITS + s[None, :]  # written by other programs: read past the L1 cache
        each = tl.load(parts + every, mask=keep[:, None] & (s < SPLITS)[None, :], other=0.0, cache_modifier=".cg")
        tl.store(y + row * M + m, tl.sum(each, axis=1), mask=keep)


def one_launch_is_faster(product: Any, rows: int, tokens: int) -> bool:
    """Whether `convolve_product_step` supports this and beats a launch for each."""
    if not isinstance(product, nn.Linear) or not isinstance(product.weight, Tensor):  # a packed weight
        return False
    plain = product.bias is None and product.weight.stride(1) == 1
    return plain and tokens == 1 and rows <= FEW and product.out_features <= MOST_OUTPUTS and _fits(product, rows)


def _fits(product: nn.Linear, rows: int) -> bool:
    """Whether the partial sums fit the workspace."""
    tiles = triton.cdiv(product.in_features, TILE[1])
    return rows * product.out_features * tiles <= PARTS and rows * product.out_features <= COUNTERS


def convolve_product_step(
    x: Tensor, conv: ShortConvolution, weight: Tensor, table: Tensor, *, tile: tuple[int, int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """x [B, 1, C] with each row's values contiguous, weight [M, C] -> conv(x) [B, 1, C], its product [B, 1, M].

    table   of the convolution's ring
    tile    in place of TILE, for measuring others
    """
    x = contiguous_rows(x)
    rows, _, channels = x.shape
    outputs, (height, block, warps) = weight.shape[0], tile or TILE
    block = min(block, triton.next_power_of_2(channels))
    splits = triton.cdiv(channels, block)
    out, y = torch.empty(rows, 1, channels, dtype=x.dtype, device=x.device), x.new_empty(rows, 1, outputs)
    parts, arrived = scratch(x.device)
    launch(
        _convolve_product, (triton.cdiv(outputs, height), splits, rows),
        x, conv.weight, conv.bias, weight, out, y, table, parts, arrived, x.stride(0), weight.stride(0),
        outputs, channels, conv.weight.shape[1], act_of(conv), height, block, splits, triton.next_power_of_2(splits),
        num_warps=warps,
    )  # fmt: skip
    return out, y
