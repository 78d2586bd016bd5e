"""Selective scan (Mamba 1) for a few tokens per row, on the states that a cache keeps; see `state.py`.

    h = exp(dt · A) · h + (dt · x) ⊗ B        h [C, N], dt and x [C], in float32
    y = h · C

With few rows a program also computes the step sizes of its channels, dt = softplus(W · norm(low) + bias): it loads its
rows of W before waiting for the launch in front. With more rows each row would read W again, so that is a launch of its
own. An RMS norm without a weight then only divides, after the product, in the scan.

Reference: `lamina.recurrence.SelectiveScan`.
"""

# Kernels gather tensors in tuples that grow:
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from lamina.kernels.entry import COUNTS, count_of
from lamina.kernels.launch import begin, begin_together, launch
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
from lamina.recurrence.selective_scan import Map, Norms

if TYPE_CHECKING:
    from lamina.nn.norm import RMSNorm

FEW = 2  # rows · tokens for which a program computes its step sizes
PIECE = 64  # of the rank: products that are added before the sum over threads


@triton.jit
def _normed(x, scale, eps, N: tl.constexpr):
    """RMS norm of x [N], times `scale` unless that is None; x itself if eps is None."""
    if eps is not None:
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    return x if scale is None else x * scale


@triton.jit
def _selective_scan(
    x, dt, B, C,  # inputs: [R, T, CHANNELS] twice (dt: None if dt_weight), [R, T, N] twice, for R rows
    A, skip, gate, bias,  # [CHANNELS, N], [CHANNELS] or None, [R, T, CHANNELS] or None, [CHANNELS] or None
    B_weight, C_weight, eps,  # of the norms of B and C: [N] or None twice; None: no norms
    low, dt_weight, low_weight, dt_eps,  # [R, T, RANK], [CHANNELS, RANK], [RANK]: dt = dt_weight · norm(low), where
    # None means: dt is that product already, undivided; a norm without weight; no norm. low None: dt is final.
    out, table,  # [R, T, CHANNELS]; the entry's table row, whose store is the states, float32 [R, CHANNELS, N]
    ready_dt, ready_B, ready_C,  # [R, T, CHANNELS], [R, T, N] twice, or None: get the inputs of the rule itself
    x_row, x_token, dt_row, dt_token, B_row, B_token, C_row, C_token, gate_row, gate_token,  # strides
    low_row, low_token,
    T: tl.constexpr, CHANNELS: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,  # values of the rank that are multiplied at a time
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
    r, part, W = tl.arange(0, RANK_BLOCK), tl.arange(0, PIECE), ()
    if dt_weight is not None:
        for i in tl.static_range(RANK_BLOCK // PIECE):
            k = i * PIECE + part
            at = dt_weight + c[:, None] * RANK + k[None, :]
            W += (tl.load(at, mask=c_mask[:, None] & (k < RANK)[None, :], other=0.0),)  # [C, PIECE]
        begin_together(PDL)  # the product that follows loads only weights before it waits
    else:
        begin(PDL)
        dt += row * dt_row + c
    x += row * x_row + c
    B += row * B_row + n
    C += row * C_row + n
    out += row * T * CHANNELS + c
    for first in range(0, T, GROUP):
        xs, dts, Bs, Cs, zs = (), (), (), (), ()
        for i in tl.static_range(GROUP):
            t, exists = first + i, first + i < T
            xs += (tl.load(x + t * x_token, mask=c_mask & exists, other=0.0).to(tl.float32),)
            if dt_weight is not None:
                products = tl.zeros([BLOCK, PIECE], tl.float32)
                for j in tl.static_range(RANK_BLOCK // PIECE):
                    k = j * PIECE + part
                    v = tl.load(low + row * low_row + t * low_token + k, mask=(k < RANK) & exists, other=0.0)
                    v = v.to(tl.float32)
                    if low_weight is not None:
                        v *= tl.load(low_weight + k, mask=k < RANK, other=0.0).to(tl.float32)
                    products += W[j].to(tl.float32) * v[None, :]
                new_dt = tl.sum(products, axis=1)
            else:
                new_dt = tl.load(dt + t * dt_token, mask=c_mask & exists, other=0.0).to(tl.float32)
            if dt_eps is not None:
                whole = tl.load(low + row * low_row + t * low_token + r, mask=(r < RANK) & exists, other=0.0)
                whole = whole.to(tl.float32)
                new_dt *= tl.rsqrt(tl.sum(whole * whole, axis=0) / RANK + dt_eps)
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
            if ready_dt is not None:
                tl.store(ready_dt + (row * T + t) * CHANNELS + c, size, mask=c_mask & (t < T))
            if ready_B is not None:
                tl.store(ready_B + (row * T + t) * N + n, Bs[i], mask=(n < N) & (t < T))
                tl.store(ready_C + (row * T + t) * N + n, Cs[i], mask=(n < N) & (t < T))
            h = tl.where(real, tl.exp(size[:, None] * a) * h + (size * xs[i])[:, None] * Bs[i][None, :], h)
            y = tl.sum(h * Cs[i][None, :], axis=1)  # [C]
            if D is not None:
                y += D * xs[i]
            if gate is not None:
                y *= zs[i] * tl.sigmoid(zs[i])
            tl.store(out + t * CHANNELS, tl.where(real, y, 0.0), mask=c_mask & (t < T))
    if WRITE:
        tl.store(state, h, mask=tile_mask & (count > 0))


def with_step_sizes(
    inputs: Tensors, dt_product: Map | None = None, dt_norm: RMSNorm | None = None, **around: Any
) -> tuple[Tensors, dict[str, Any]]:
    """(inputs, around) with the product that makes `dt` computed; only the division by a norm may be left."""
    if dt_product is None:
        return inputs, around
    low = inputs["dt"]
    if dt_norm is not None and dt_norm.weight is None:
        around["dt_divisor"] = low, dt_norm.eps
        dt_norm = None
    return {**inputs, "dt": dt_product(low if dt_norm is None else dt_norm(low))}, around


def selective_scan_step(
    inputs: Tensors,
    constants: Tensors,
    table: Tensor,
    *,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    dt_bias: Tensor | None = None,
    norms: Norms | None = None,
    dt_product: Any = None,
    dt_norm: RMSNorm | None = None,
    dt_divisor: tuple[Tensor, float] | None = None,
    write: bool = True,
    ready: Tensors | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Selective scan: x and dt [B, T, C], B and C [B, T, N]; A [C, N]; the state is [B, C, N] -> [B, T, C].

    skip        D [C]: adds D x, in the dtype that this sum has in PyTorch
    gate        z [B, T, C]: multiplies by silu(z), in the dtype of z
    norms       (eps, weight of B [N] or None, weight of C [N] or None): B and C are RMS-normed first
    dt_product  module: dt is [B, T, rank], and its product is meant; dt_norm: the norm of dt before that
    dt_divisor  (low [B, T, rank], eps): dt is divided by the root mean square of `low`
    dt_bias     [C]: dt is as projected, and the step size is softplus(dt + dt_bias)
    ready       `dt`, `B` and `C` in it are filled with the step sizes and the normed B and C
    """
    rows, tokens, channels = inputs["x"].shape
    dt_weight, low_weight = None, None
    low, dt_eps = dt_divisor or (None, None)
    if dt_product is not None:
        if rows * tokens <= FEW and _is_plain(dt_product, dt_norm):
            dt_weight, low = dt_product.weight, inputs["dt"]
            if dt_norm is not None:
                low_weight, dt_eps = dt_norm.weight, dt_norm.eps
        else:
            inputs, around = with_step_sizes(inputs, dt_product, dt_norm)
            low, dt_eps = around.get("dt_divisor", (None, None))
    x, B, C = (contiguous_tokens(inputs[name]) for name in ("x", "B", "C"))
    dt = None if dt_weight is not None else contiguous_tokens(inputs["dt"])
    state = B.shape[2]
    z = None if gate is None else contiguous_tokens(gate)
    out = torch.empty(rows, tokens, channels, dtype=output_dtype(x, skip, gate), device=x.device)
    eps, B_weight, C_weight = norms or (None, None, None)
    low = None if low is None else contiguous_tokens(low)
    rank = 1 if low is None else low.shape[2]
    ranks = triton.next_power_of_2(rank)
    tile, live_only = tile_for(SelectiveScan, rows * channels * state, tile)
    warps = tile.warps if dt_weight is None else 2 * tile.warps  # the product has more values than the state
    wide = triton.next_power_of_2(state)
    block = min(max(tile.values // wide, 1), triton.next_power_of_2(channels))
    launch(
        _selective_scan, (triton.cdiv(channels, block), rows),
        x, dt, B, C, constants["A"], skip, z, dt_bias, B_weight, C_weight, eps, low, dt_weight, low_weight, dt_eps,
        out, table, *((ready or {}).get(name) for name in ("dt", "B", "C")),
        *x.stride()[:2], *row_and_token_strides(dt), *B.stride()[:2], *C.stride()[:2],
        *row_and_token_strides(z), *row_and_token_strides(low), tokens, channels, state, rank, ranks,
        min(PIECE, ranks), block, wide, tokens_together(tokens), live_only, write, num_warps=warps,
    )  # fmt: skip
    return out


def _is_plain(product: Any, norm: RMSNorm | None) -> bool:
    """Whether the kernel computes this product of this norm: rows of the weight without gaps, and no bias."""
    fits = isinstance(product, nn.Linear) and product.bias is None and product.weight.is_contiguous()
    return fits and (norm is None or not norm.plus_one)
