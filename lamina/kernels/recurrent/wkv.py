"""The WKV of RWKV-4 for a few tokens per row, on the states that a cache keeps; see `state.py`.

    y = (num + exp(k + first) v) / (den + exp(k + first))
    num = exp(w) num + exp(k) v        den = exp(w) den + exp(k)

num and den are stored divided by exp(top), three values per channel. Reference: `lamina.recurrence.WKV`.
"""

# Kernels gather tensors in tuples that grow:
# mypy: disable-error-code="assignment, var-annotated"
# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.entry import COUNTS, count_of
from lamina.kernels.launch import begin, launch
from lamina.kernels.recurrent.state import (
    Tile,
    contiguous_tokens,
    output_dtype,
    row_and_token_strides,
    state_of,
    tile_for,
    tokens_together,
)
from lamina.recurrence import WKV
from lamina.recurrence.rule import Tensors

EMPTY = tl.constexpr(-1e38)  # the exponent of sums without a token


@triton.jit
def merge(num, den, top, v, k):
    """Adds exp(k) v and exp(k) to sums that are divided by exp(top). -> (num, den, top)"""
    highest = tl.maximum(top, k)
    a, b = tl.exp(top - highest), tl.exp(k - highest)
    return a * num + b * v, a * den + b, highest


@triton.jit
def _wkv(
    k, v, w, extra, gate,  # [R, T, C] twice, [C] twice, [R, T, C] or None, for R rows
    out, table,  # [R, T, C]; the entry's table row, whose store is the states, float32 [R, 3, C]
    k_row, k_token, v_row, v_token, gate_row, gate_token,  # strides
    T: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,  # GROUP: tokens loaded together
    LIVE_ONLY: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row): channels i · BLOCK … of the row's state, over all T tokens."""
    row, c = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c_mask = c < C
    state = state_of(table) + row * (3 * C) + c
    count = count_of(tl.load(table + COUNTS), row, T)
    live = c_mask & (count > 0) if LIVE_ONLY else c_mask
    num = tl.load(state, mask=live, other=0.0)
    den = tl.load(state + C, mask=live, other=0.0)
    top = tl.load(state + 2 * C, mask=live, other=0.0)
    top = tl.where(den == 0.0, EMPTY, top)
    decay = tl.load(w + c, mask=c_mask, other=0.0).to(tl.float32)
    own = tl.load(extra + c, mask=c_mask, other=0.0).to(tl.float32)
    begin(PDL)
    k += row * k_row + c
    v += row * v_row + c
    out += row * T * C + c
    for first in range(0, T, GROUP):
        ks, vs, zs = (), (), ()
        for i in tl.static_range(GROUP):
            t, exists = first + i, first + i < T
            ks += (tl.load(k + t * k_token, mask=c_mask & exists, other=0.0).to(tl.float32),)
            vs += (tl.load(v + t * v_token, mask=c_mask & exists, other=0.0).to(tl.float32),)
            if gate is not None:
                z = gate + row * gate_row + t * gate_token + c
                zs += (tl.load(z, mask=c_mask & exists, other=0.0).to(tl.float32),)
        for i in tl.static_range(GROUP):
            t, real = first + i, first + i < count
            over, under, _ = merge(num, den, top, vs[i], ks[i] + own)
            y = over / under
            new_num, new_den, new_top = merge(num, den, top + decay, vs[i], ks[i])
            num, den, top = (
                tl.where(real, new_num, num),
                tl.where(real, new_den, den),
                tl.where(real, new_top, top),
            )
            if gate is not None:
                y *= tl.sigmoid(zs[i])
            tl.store(out + t * C, tl.where(real, y, 0.0), mask=c_mask & (t < T))
    if WRITE:
        keep = c_mask & (count > 0)
        tl.store(state, num, mask=keep)
        tl.store(state + C, den, mask=keep)
        tl.store(state + 2 * C, top, mask=keep)


def wkv_step(
    inputs: Tensors,
    constants: Tensors,
    table: Tensor,
    *,
    gate: Tensor | None = None,
    write: bool = True,
    ready: Tensors | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """WKV: k and v [B, T, C]; w and first [C]; the state is [B, 3, C] -> [B, T, C]. The input `token` is not read:
    counts say which tokens are real.

    gate   r [B, T, C]: multiplies by sigmoid(r), in the dtype of r
    ready  is not written to: the inputs are those of the rule itself
    """
    k, v = contiguous_tokens(inputs["k"]), contiguous_tokens(inputs["v"])
    rows, tokens, channels = v.shape
    z = None if gate is None else contiguous_tokens(gate)
    out = torch.empty(rows, tokens, channels, dtype=output_dtype(v, None, gate), device=v.device)
    tile, live_only = tile_for(WKV, rows * 3 * channels, tile)
    block = min(tile.values, triton.next_power_of_2(channels))
    launch(
        _wkv, (triton.cdiv(channels, block), rows),
        k, v, constants["w"], constants["first"], z, out, table,
        *k.stride()[:2], *v.stride()[:2], *row_and_token_strides(z),
        tokens, channels, block, tokens_together(tokens), live_only, write,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
