"""The mixer kernel around SSD (Mamba 2): convolution of x, B and C, one token of the rule, skip, gate, norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.entry import COUNTS, count_of
from lamina.kernels.launch import begin_together, launch
from lamina.kernels.recurrent.conv import ring_of
from lamina.kernels.recurrent.mixer_stages import (
    act_of,
    contiguous_rows,
    convolve_history,
    convolve_new,
    norm_arguments,
    normalize_group,
    store_cache,
    store_output,
    tile_for,
    warps_for,
)
from lamina.kernels.recurrent.ssd import ssd_token
from lamina.kernels.recurrent.state import Tile, bounds, state_of, step_size
from lamina.recurrence import SSD
from lamina.recurrence.rule import Tensors

if TYPE_CHECKING:
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm
    from lamina.nn.recurrent.short_conv import ShortConvolution


@triton.jit
def _ssd_kernel(
    x, dt, gate,  # [R, C] with C = H·P + 2·(H // SHARED)·N, [R, H], [R, H·P], for R rows
    taps, bias, A, skip, dt_bias, low, high,  # [C, K], [C] or None, [H], [H] or None twice, bounds of dt or None
    weight, eps, sums, arrived,  # the norm's: see NormArguments
    out, rings, table,  # [R, H·P]; the table rows of the convolution's ring and of the states, float32 [R, H, P, N]
    x_row, dt_row, gate_row,  # strides
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, PROGRAMS: tl.constexpr,
    GATE_FIRST: tl.constexpr, UNNORMED: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr, N_BLOCK: tl.constexpr,
    LIVE_ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): rows i · BLOCK … of the head's state [P, N]. The channels of x are x, B, then C."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    C: tl.constexpr = H * P + 2 * (H // SHARED) * N
    p, n = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
    p_mask, n_mask = p < P, n < N
    tile_mask = p_mask[:, None] & n_mask[None, :]
    at_x = head * P + p  # channels
    at_B = H * P + head // SHARED * N + n
    at_C = at_B + (H // SHARED) * N
    state, counts = state_of(table) + (row * H + head) * (P * N) + p[:, None] * N + n[None, :], tl.load(table + COUNTS)
    ring, size, length = ring_of(rings, row, C, x.dtype.element_ty)
    count = count_of(counts, row, 1)
    h = tl.load(state, mask=tile_mask & (count > 0) if LIVE_ONLY else tile_mask, other=0.0)  # [P, N]
    x_sum, x_tap = convolve_history(ring, size, length, taps, bias, at_x, p_mask, C, K)
    B_sum, B_tap = convolve_history(ring, size, length, taps, bias, at_B, n_mask, C, K)
    C_sum, C_tap = convolve_history(ring, size, length, taps, bias, at_C, n_mask, C, K)
    a = tl.load(A + head).to(tl.float32)
    step_bias = None if dt_bias is None else tl.load(dt_bias + head).to(tl.float32)
    D = None if skip is None else tl.load(skip + head).to(tl.float32)
    norm_scale = tl.load(weight + at_x, mask=p_mask, other=0.0).to(tl.float32) if UNNORMED else None
    begin_together(PDL)  # the product that follows loads only weights before it waits
    new_x = tl.load(x + row * x_row + at_x, mask=p_mask, other=0.0)
    new_B = tl.load(x + row * x_row + at_B, mask=n_mask, other=0.0)
    new_C = tl.load(x + row * x_row + at_C, mask=n_mask, other=0.0)
    projected_dt = tl.load(dt + row * dt_row + head).to(tl.float32)
    z = tl.load(gate + row * gate_row + at_x, mask=p_mask, other=0.0).to(tl.float32)

    real = count > 0
    values = convolve_new(x_sum, x_tap, new_x, p_mask, ACT)
    keys = convolve_new(B_sum, B_tap, new_B, n_mask, ACT)
    queries = convolve_new(C_sum, C_tap, new_C, n_mask, ACT)
    h, y = ssd_token(h, values, step_size(projected_dt, step_bias, low, high), keys, queries, a)
    ring += length % size * C
    first = (block == 0) & (head % SHARED == 0)
    if not PROGRAMS:
        store_cache(state, h, tile_mask, ring, at_x, new_x, p_mask, at_B, new_B, at_C, new_C, n_mask, real, first)
    if D is not None:
        y += D * values
    group = head * P // GROUP if GROUP else 0
    y, last = store_output(
        y, z, norm_scale, real, row, group, at_x, p_mask, out, sums, arrived,
        H * P, GROUP, PROGRAMS, GATE_FIRST, UNNORMED, SIGMOID,
    )  # fmt: skip
    if UNNORMED:
        tl.store(sums + head * tl.num_programs(0) + block, tl.sum(y * y, axis=0))
    if PROGRAMS:  # the cache is stored after y, so the program that waits for every y does not wait for this
        store_cache(state, h, tile_mask, ring, at_x, new_x, p_mask, at_B, new_B, at_C, new_C, n_mask, real, first)
        if last:
            normalize_group(
                row, group, real, out, sums, gate, gate_row, weight, eps, H * P, GROUP, GROUP_BLOCK, DIM, GATE_FIRST,
                SIGMOID,
            )  # fmt: skip


def mix_ssd(
    rule: SSD, x: Tensor, inputs: Tensors, constants: Tensors, rings: Tensor, table: Tensor,
    conv: ShortConvolution, gate: Tensor, norm: GatedRMSNorm | None,
    *, skip: Tensor | None = None, dt_bias: Tensor | None = None, dt_limit: tuple[float, float] | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """`mix_step` for SSD; keywords as `ssd_step` has them."""
    rows, heads, dim, state = x.shape[0], rule.heads, rule.head_dim, rule.state
    x, dt, z = contiguous_rows(x), contiguous_rows(inputs["dt"]), contiguous_rows(gate)
    tile, live_only = tile_for(rule, rows, tile)
    wide = triton.next_power_of_2(state)
    block = min(max(tile.values // wide, 1), triton.next_power_of_2(dim))
    blocks = triton.cdiv(dim, block)
    end = norm_arguments(norm, z, heads, dim, blocks)
    out = torch.empty(rows, 1, heads * dim, dtype=gate.dtype, device=x.device)
    launch(
        _ssd_kernel, (blocks, heads, rows),
        x, dt, z, conv.weight, conv.bias, constants["A"], skip, dt_bias, *bounds(dt_limit), *end[:4], out, rings, table,
        x.stride(0), dt.stride(0), z.stride(0), heads, dim, state, heads // rule.groups, conv.weight.shape[1],
        act_of(conv), *end[4:], block, wide, live_only, num_warps=warps_for(tile, end),
    )  # fmt: skip
    return end.result(out)
