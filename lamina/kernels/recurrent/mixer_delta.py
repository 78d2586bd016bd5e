"""The mixer kernel around the gated delta rule: convolution of q, k and v, one token of the rule, gate, norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.entry import COUNTS, count_of
from lamina.kernels.launch import begin_together, launch
from lamina.kernels.recurrent.conv import ring_of
from lamina.kernels.recurrent.gated_delta import delta_inputs, delta_token, load_decay
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
from lamina.kernels.recurrent.state import Tile, state_of
from lamina.recurrence import ChannelDelta, GatedDelta
from lamina.recurrence.rule import Tensors

if TYPE_CHECKING:
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm
    from lamina.nn.recurrent.short_conv import ShortConvolution


@triton.jit
def _delta_kernel(
    x, g, beta, gate,  # [R, C] with C = 2·(H // SHARED)·D + H·V, [R, H] or [R, H·D], [R, H], [R, H·V], for R rows
    taps, bias, A, dt_bias, scale,  # [C, K], [C] or None, [H] or None, shaped like g or None, of UNIT queries
    weight, eps, sums, arrived,  # the norm's: see NormArguments
    out, rings, table,  # [R, H·V]; the table rows of the convolution's ring and of the states, float32 [R, H, D, V]
    x_row, g_row, beta_row, gate_row,  # strides
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, PROGRAMS: tl.constexpr,
    GATE_FIRST: tl.constexpr, UNNORMED: tl.constexpr, SIGMOID: tl.constexpr,
    UNIT: tl.constexpr, BY_CHANNEL: tl.constexpr, DOUBLED: tl.constexpr, BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
    LIVE_ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): columns i · BLOCK … of the head's state [D, V]. The channels of x are q, k, then v."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    C: tl.constexpr = 2 * (H // SHARED) * D + H * V
    d, e = tl.arange(0, D_BLOCK), block * BLOCK + tl.arange(0, BLOCK)
    d_mask, e_mask = d < D, e < V
    tile_mask = d_mask[:, None] & e_mask[None, :]
    at_q = head // SHARED * D + d  # channels
    at_k = at_q + (H // SHARED) * D
    at_y = head * V + e  # of the output
    at_v = 2 * (H // SHARED) * D + at_y
    state, counts = state_of(table) + (row * H + head) * (D * V) + d[:, None] * V + e[None, :], tl.load(table + COUNTS)
    ring, size, length = ring_of(rings, row, C, x.dtype.element_ty)
    count = count_of(counts, row, 1)
    s = tl.load(state, mask=tile_mask & (count > 0) if LIVE_ONLY else tile_mask, other=0.0)  # [D, V]
    q_sum, q_tap = convolve_history(ring, size, length, taps, bias, at_q, d_mask, C, K)
    k_sum, k_tap = convolve_history(ring, size, length, taps, bias, at_k, d_mask, C, K)
    v_sum, v_tap = convolve_history(ring, size, length, taps, bias, at_v, e_mask, C, K)
    a = None if A is None else tl.load(A + head).to(tl.float32)
    step_bias = None if dt_bias is None else load_decay(dt_bias, head, d, D, True, BY_CHANNEL)
    norm_scale = tl.load(weight + at_y, mask=e_mask, other=0.0).to(tl.float32) if UNNORMED else None
    begin_together(PDL)  # the product that follows loads only weights before it waits
    new_q = tl.load(x + row * x_row + at_q, mask=d_mask, other=0.0)
    new_k = tl.load(x + row * x_row + at_k, mask=d_mask, other=0.0)
    new_v = tl.load(x + row * x_row + at_v, mask=e_mask, other=0.0)
    log_decay = load_decay(g + row * g_row, head, d, D, True, BY_CHANNEL)
    strength = tl.load(beta + row * beta_row + head).to(tl.float32)
    z = tl.load(gate + row * gate_row + at_y, mask=e_mask, other=0.0).to(tl.float32)

    real = count > 0
    query = convolve_new(q_sum, q_tap, new_q, d_mask, ACT)
    key = convolve_new(k_sum, k_tap, new_k, d_mask, ACT)
    value = convolve_new(v_sum, v_tap, new_v, e_mask, ACT)
    query, key, log_decay, strength = delta_inputs(query, key, log_decay, strength, a, step_bias, scale, UNIT, DOUBLED)
    s, y = delta_token(s, query, key, value, log_decay, strength, BY_CHANNEL)
    ring += length % size * C
    first = (block == 0) & (head % SHARED == 0)
    if not PROGRAMS:
        store_cache(state, s, tile_mask, ring, at_v, new_v, e_mask, at_q, new_q, at_k, new_k, d_mask, real, first)
    group = head * V // GROUP if GROUP else 0
    y, last = store_output(
        y, z, norm_scale, real, row, group, at_y, e_mask, out, sums, arrived,
        H * V, GROUP, PROGRAMS, GATE_FIRST, UNNORMED, SIGMOID,
    )  # fmt: skip
    if UNNORMED:
        tl.store(sums + head * tl.num_programs(0) + block, tl.sum(y * y, axis=0))
    if PROGRAMS:  # the cache is stored after y, so the program that waits for every y does not wait for this
        store_cache(state, s, tile_mask, ring, at_v, new_v, e_mask, at_q, new_q, at_k, new_k, d_mask, real, first)
        if last:
            normalize_group(
                row, group, real, out, sums, gate, gate_row, weight, eps, H * V, GROUP, GROUP_BLOCK, DIM, GATE_FIRST,
                SIGMOID,
            )  # fmt: skip


def mix_delta(
    rule: GatedDelta | ChannelDelta, x: Tensor, inputs: Tensors, rings: Tensor, table: Tensor,
    conv: ShortConvolution, gate: Tensor, norm: GatedRMSNorm | None,
    *, unit: bool = False, gates: tuple[Tensor, Tensor] | None = None, doubled: bool = False, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """`mix_step` for a delta rule; keywords as `gated_delta_step` has them."""
    by_channel = isinstance(rule, ChannelDelta)
    rows, (heads, key, value) = x.shape[0], rule.state_shape
    key_heads = rule.key_heads if isinstance(rule, GatedDelta) else heads
    x, g, beta, z = (contiguous_rows(one) for one in (x, inputs["g"].flatten(2), inputs["beta"], gate))
    A, dt_bias = gates or (None, None)
    tile, live_only = tile_for(rule, rows, tile)
    tall = triton.next_power_of_2(key)
    block = min(max(tile.values // tall, 1), triton.next_power_of_2(value))
    blocks = triton.cdiv(value, block)
    end = norm_arguments(norm, z, heads, value, blocks)
    out = torch.empty(rows, 1, heads * value, dtype=gate.dtype, device=x.device)
    launch(
        _delta_kernel, (blocks, heads, rows),
        x, g, beta, z, conv.weight, conv.bias, A, dt_bias, key**-0.5, *end[:4], out, rings, table,
        x.stride(0), g.stride(0), beta.stride(0), z.stride(0),
        heads, key, value, heads // key_heads, conv.weight.shape[1], act_of(conv), *end[4:], unit, by_channel,
        doubled, block, tall, live_only, num_warps=warps_for(tile, end),
    )  # fmt: skip
    return end.result(out)
