"""SSD (Mamba 2) for a few tokens per row, on the states that a cache keeps; see `state.py`.

    h = exp(dt · A) · h + (dt · x) ⊗ B        h [P, N] per head, in float32
    y = h · C

Reference: `lamina.recurrence.SSD`.
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
    bounds,
    contiguous_tokens,
    output_dtype,
    row_and_token_strides,
    state_of,
    step_size,
    tile_for,
    tokens_together,
)
from lamina.recurrence import SSD
from lamina.recurrence.rule import Tensors


@triton.jit
def ssd_token(h, x, dt, B, C, a):
    """One token of one head: h [P, N], x [P], B and C [N], step size dt, decay a = A[head] -> (new h, y [P])."""
    h = tl.exp(dt * a) * h + (dt * x)[:, None] * B[None, :]
    return h, tl.sum(h * C[None, :], axis=1)


@triton.jit
def _ssd(
    x, dt, B, C,  # inputs: [R, T, H, P], [R, T, H], [R, T, G, N] twice, for R rows
    A, skip, gate, bias, low, high,  # [H], [H] or None, [R, T, H, P] or None, [H] or None, bounds of dt or None
    out, table,  # [R, T, H, P]; the entry's table row, whose store is the states, float32 [R, H, P, N]
    ready_dt,  # [R, T, H] or None: gets the step sizes
    x_row, x_token, dt_row, dt_token, B_row, B_token, C_row, C_token, gate_row, gate_token,  # strides
    T: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr,  # SHARED: heads per group
    BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, GROUP: tl.constexpr,  # GROUP: tokens loaded together
    LIVE_ONLY: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): rows i · BLOCK … of the head's state [P, N], over all T tokens."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
    p_mask, tile_mask = p < P, (p < P)[:, None] & (n < N)[None, :]
    state = state_of(table) + (row * H + head) * (P * N) + p[:, None] * N + n[None, :]
    count = count_of(tl.load(table + COUNTS), row, T)
    h = tl.load(state, mask=tile_mask & (count > 0) if LIVE_ONLY else tile_mask, other=0.0)  # [P, N]
    a = tl.load(A + head).to(tl.float32)
    dt_bias = None if bias is None else tl.load(bias + head).to(tl.float32)
    D = None if skip is None else tl.load(skip + head).to(tl.float32)
    begin(PDL)
    x += row * x_row + head * P + p
    dt += row * dt_row + head
    B += row * B_row + head // SHARED * N + n
    C += row * C_row + head // SHARED * N + n
    out += row * T * H * P + head * P + p
    for first in range(0, T, GROUP):
        xs, dts, Bs, Cs, zs = (), (), (), (), ()
        for i in tl.static_range(GROUP):
            t, exists = first + i, first + i < T
            xs += (tl.load(x + t * x_token, mask=p_mask & exists, other=0.0).to(tl.float32),)
            dts += (tl.load(dt + t * dt_token, mask=exists, other=0.0).to(tl.float32),)
            Bs += (tl.load(B + t * B_token, mask=(n < N) & exists, other=0.0).to(tl.float32),)
            Cs += (tl.load(C + t * C_token, mask=(n < N) & exists, other=0.0).to(tl.float32),)
            if gate is not None:
                z = gate + row * gate_row + t * gate_token + head * P + p
                zs += (tl.load(z, mask=p_mask & exists, other=0.0).to(tl.float32),)
        for i in tl.static_range(GROUP):
            t, real = first + i, first + i < count
            size = step_size(dts[i], dt_bias, low, high)
            if ready_dt is not None:
                tl.store(ready_dt + (row * T + t) * H + head, size, mask=t < T)
            new, y = ssd_token(h, xs[i], size, Bs[i], Cs[i], a)
            h = tl.where(real, new, h)
            if D is not None:
                y += D * xs[i]
            if gate is not None:
                y *= zs[i] * tl.sigmoid(zs[i])
            tl.store(out + t * H * P, tl.where(real, y, 0.0), mask=p_mask & (t < T))
    if WRITE:
        tl.store(state, h, mask=tile_mask & (count > 0))


def ssd_step(
    inputs: Tensors,
    constants: Tensors,
    table: Tensor,
    *,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] | None = None,
    write: bool = True,
    ready: Tensors | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """SSD: x [B, T, H, P], dt [B, T, H], B and C [B, T, G, N]; A [H]; the state is [B, H, P, N] -> [B, T, H, P].

    skip      D [H]: adds D x, in the dtype that this sum has in PyTorch
    gate      z [B, T, H, P]: multiplies by silu(z), in the dtype of z
    dt_bias   [H]: dt is as projected, and the step size is softplus(dt + dt_bias)
    dt_limit  the step size is then clamped to this range
    ready     `dt` in it is filled with the step sizes
    """
    x, dt, B, C = (contiguous_tokens(inputs[name]) for name in ("x", "dt", "B", "C"))
    rows, tokens, heads, dim = x.shape
    state = B.shape[3]
    z = None if gate is None else contiguous_tokens(gate)
    out = torch.empty(rows, tokens, heads, dim, dtype=output_dtype(x, skip, gate), device=x.device)
    tile, live_only = tile_for(SSD, rows * heads * dim * state, tile)
    wide = triton.next_power_of_2(state)
    block = min(max(tile.values // wide, 1), triton.next_power_of_2(dim))
    launch(
        _ssd, (triton.cdiv(dim, block), heads, rows),
        x, dt, B, C, constants["A"], skip, z, dt_bias, *bounds(dt_limit), out, table, (ready or {}).get("dt"),
        *x.stride()[:2], *dt.stride()[:2], *B.stride()[:2], *C.stride()[:2], *row_and_token_strides(z), tokens,
        heads, dim, state, heads // B.shape[2], block, wide, tokens_together(tokens), live_only, write,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
