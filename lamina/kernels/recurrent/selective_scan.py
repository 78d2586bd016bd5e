"""Selective scan (Mamba 1) for a few tokens per row, on the states that a cache keeps; see `state.py`.

    h = exp(dt · A) · h + (dt · x) ⊗ B        h [C, N], dt and x [C], in float32
    y = h · C

Reference: `lamina.recurrence.SelectiveScan`.
"""

# Kernels gather tensors in tuples that grow:
# mypy: disable-error-code="assignment, var-annotated"

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
    step_size,
    tile_for,
    tokens_together,
)
from lamina.recurrence import SelectiveScan
from lamina.recurrence.rule import Tensors
from lamina.recurrence.selective_scan import Norms


@triton.jit
def _normed(x, scale, eps, N: tl.constexpr):
    """RMS norm of x [N], times `scale` unless that is None; x itself if eps is None."""
    if eps is not None:
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    return x if scale is None else x * scale


@triton.jit
def _selective_scan(
    x, dt, B, C,  # inputs: [R, T, CHANNELS] twice, [R, T, N] twice, for R rows
    A, skip, gate, bias,  # [CHANNELS, N], [CHANNELS] or None, [R, T, CHANNELS] or None, [CHANNELS] or None
    B_weight, C_weight, eps,  # of the norms of B and C: [N] or None twice; None: no norms
    low, dt_eps,  # dt is divided by the root mean square of low [R, T, RANK]; None: it is not
    out, table,  # [R, T, CHANNELS]; the entry's table row, whose store is the states, float32 [R, CHANNELS, N]
    x_row, x_token, dt_row, dt_token, B_row, B_token, C_row, C_token, gate_row, gate_token,  # strides
    low_row, low_token,
    T: tl.constexpr, CHANNELS: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, GROUP: tl.constexpr,  # GROUP: tokens loaded together
    LIVE_ONLY: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row): channels i · BLOCK … of the row's state [CHANNELS, N], over all T tokens."""
    row = tl.program_id(1).to(tl.int64)
    c, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
    c_mask, tile_mask = c < CHANNELS, (c < CHANNELS)[:, None] & (n < N)[None, :]
    offset = c[:, None] * N + n[None, :]
    state = state_of(table) + row * (CHANNELS * N) + offset
    count = count_of(tl.load(table + COUNTS), row, T)
    h = tl.load(state, mask=tile_mask & (count > 0) if LIVE_ONLY else tile_mask, other=0.0)  # [C, N]
    a = tl.load(A + offset, mask=tile_mask, other=0.0).to(tl.float32)
    dt_bias = None if bias is None else tl.load(bias + c, mask=c_mask, other=0.0).to(tl.float32)
    D = None if skip is None else tl.load(skip + c, mask=c_mask, other=0.0).to(tl.float32)
    B_scale = None if B_weight is None else tl.load(B_weight + n, mask=n < N, other=0.0).to(tl.float32)
    C_scale = None if C_weight is None else tl.load(C_weight + n, mask=n < N, other=0.0).to(tl.float32)
    begin(PDL)
    x += row * x_row + c
    dt += row * dt_row + c
    B += row * B_row + n
    C += row * C_row + n
    out += row * T * CHANNELS + c
    for first in range(0, T, GROUP):
        xs, dts, Bs, Cs, zs = (), (), (), (), ()
        for i in tl.static_range(GROUP):
            t, exists = first + i, first + i < T
            xs += (tl.load(x + t * x_token, mask=c_mask & exists, other=0.0).to(tl.float32),)
            new_dt = tl.load(dt + t * dt_token, mask=c_mask & exists, other=0.0).to(tl.float32)
            if low is not None:
                r = tl.arange(0, RANK_BLOCK)
                root = tl.load(low + row * low_row + t * low_token + r, mask=(r < RANK) & exists, other=0.0)
                root = root.to(tl.float32)
                new_dt *= tl.rsqrt(tl.sum(root * root, axis=0) / RANK + dt_eps)
            dts += (new_dt,)
            new_B = tl.load(B + t * B_token, mask=(n < N) & exists, other=0.0).to(tl.float32)
            new_C = tl.load(C + t * C_token, mask=(n < N) & exists, other=0.0).to(tl.float32)
            Bs += (_normed(new_B, B_scale, eps, N),)
            Cs += (_normed(new_C, C_scale, eps, N),)
            if gate is not None:
                z = gate + row * gate_row + t * gate_token + c
                zs += (tl.load(z, mask=c_mask & exists, other=0.0).to(tl.float32),)
        for i in tl.static_range(GROUP):
            t, real = first + i, first + i < count
            size = step_size(dts[i], dt_bias, None, None)
            h = tl.where(real, tl.exp(size[:, None] * a) * h + (size * xs[i])[:, None] * Bs[i][None, :], h)
            y = tl.sum(h * Cs[i][None, :], axis=1)  # [C]
            if D is not None:
                y += D * xs[i]
            if gate is not None:
                y *= zs[i] * tl.sigmoid(zs[i])
            tl.store(out + t * CHANNELS, tl.where(real, y, 0.0), mask=c_mask & (t < T))
    if WRITE:
        tl.store(state, h, mask=tile_mask & (count > 0))


def selective_scan_step(
    inputs: Tensors,
    constants: Tensors,
    table: Tensor,
    *,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    dt_bias: Tensor | None = None,
    norms: Norms | None = None,
    dt_norm: tuple[Tensor, float] | None = None,
    write: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """Selective scan: x and dt [B, T, C], B and C [B, T, N]; A [C, N]; the state is [B, C, N] -> [B, T, C].

    skip     D [C]: adds D x, in the dtype that this sum has in PyTorch
    gate     z [B, T, C]: multiplies by silu(z), in the dtype of z
    norms    (eps, weight of B [N] or None, weight of C [N] or None): B and C are RMS-normed first
    dt_norm  (low [B, T, rank], eps): dt is divided by the root mean square of `low`
    dt_bias  [C]: dt is as projected, and the step size is softplus(dt + dt_bias)
    """
    x, dt, B, C = (contiguous_tokens(inputs[name]) for name in ("x", "dt", "B", "C"))
    rows, tokens, channels = x.shape
    state = B.shape[2]
    z = None if gate is None else contiguous_tokens(gate)
    out = torch.empty(rows, tokens, channels, dtype=output_dtype(x, skip, gate), device=x.device)
    eps, B_weight, C_weight = norms or (None, None, None)
    low, dt_eps = dt_norm or (None, None)
    low = None if low is None else contiguous_tokens(low)
    rank = 1 if low is None else low.shape[2]
    tile, live_only = tile_for(SelectiveScan, rows * channels * state, tile)
    wide = triton.next_power_of_2(state)
    block = min(max(tile.values // wide, 1), triton.next_power_of_2(channels))
    launch(
        _selective_scan, (triton.cdiv(channels, block), rows),
        x, dt, B, C, constants["A"], skip, z, dt_bias, B_weight, C_weight, eps, low, dt_eps, out, table,
        *x.stride()[:2], *dt.stride()[:2], *B.stride()[:2], *C.stride()[:2], *row_and_token_strides(z),
        *row_and_token_strides(low), tokens, channels, state, rank, triton.next_power_of_2(rank),
        block, wide, tokens_together(tokens), live_only, write,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
