"""The delta rules for a few tokens per row, on the states that a cache keeps; see `state.py`.

    S = exp(g) · S
    S = S + k ⊗ beta · (v - Sᵀ k)             S [K, V] per value head, in float32
    y = Sᵀ q

The decay exp(g) is one per head (`GatedDelta`), or one per key channel, a row of S (`ChannelDelta`).
References: `lamina.recurrence`.
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
    softplus,
    state_of,
    tile_for,
    tokens_together,
)
from lamina.recurrence import ChannelDelta, GatedDelta
from lamina.recurrence.rule import Tensors


@triton.jit
def load_decay(g, head, d, K: tl.constexpr, exists, BY_CHANNEL: tl.constexpr):
    """The log decay of one token of one head, float32: one per key channel d, [K_BLOCK], from g [H, K]; or one, from
    g [H]."""
    if BY_CHANNEL:
        x = tl.load(g + head * K + d, mask=(d < K) & exists, other=0.0)
    else:
        x = tl.load(g + head, mask=exists, other=0.0)
    return x.to(tl.float32)


@triton.jit
def delta_inputs(q, k, g, beta, a, dt_bias, scale, UNIT: tl.constexpr, DOUBLED: tl.constexpr):
    """The inputs of the rule itself. With a dt_bias, g and beta are as projected. UNIT: q and k are normalized to
    length one, and q times `scale`."""
    if UNIT:
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
    if dt_bias is not None:
        g = a * softplus(g + dt_bias)
        beta = tl.sigmoid(beta)
    if DOUBLED:
        beta *= 2.0
    return q, k, g, beta


@triton.jit
def delta_token(s, q, k, v, g, beta, BY_CHANNEL: tl.constexpr):
    """One token of one head: s [K, V], q and k [K], v [V], log decay g and strength beta -> (new s, y [V]).
    BY_CHANNEL: g is [K], not a scalar."""
    # With u = beta · (v - decay · Sᵀk), the new S is decay · S + k ⊗ u, and y = decay · Sᵀq + (k·q) u: both products
    # with the old S can run at once.
    decay = tl.exp(g)
    if BY_CHANNEL:
        s_k = tl.sum((decay * k)[:, None] * s, axis=0)  # [V], decayed
        s_q = tl.sum((decay * q)[:, None] * s, axis=0)
        kept = decay[:, None] * s
    else:
        s_k = decay * tl.sum(k[:, None] * s, axis=0)
        s_q = decay * tl.sum(q[:, None] * s, axis=0)
        kept = decay * s
    u = beta * (v - s_k)
    return kept + k[:, None] * u[None, :], s_q + tl.sum(k * q, axis=0) * u


@triton.jit
def _gated_delta(
    q, k, v, g, beta,  # inputs: [R, T, H // SHARED, K] twice, [R, T, H, V], [R, T, H], or [R, T, H, K] if BY_CHANNEL,
    # and [R, T, H], for R rows
    A, bias, gate, scale,  # [H] or None, [H] or [H, K] or None, [R, T, H, V] or None, of UNIT queries
    out, table,  # [R, T, H, V]; the entry's table row, whose store is the states, float32 [R, H, K, V]
    ready_q, ready_k, ready_g, ready_beta,  # as q, k, g and beta, or None: get the inputs of the rule itself
    q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, beta_row, beta_token, gate_row, gate_token,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SHARED: tl.constexpr, UNIT: tl.constexpr, BY_CHANNEL: tl.constexpr, DOUBLED: tl.constexpr,
    # SHARED: value heads per key head
    BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, GROUP: tl.constexpr,  # GROUP: tokens loaded together
    LIVE_ONLY: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): columns i · BLOCK … of the head's state [K, V], over all T tokens."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d, e = tl.arange(0, K_BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e_mask, tile_mask = e < V, (d < K)[:, None] & (e < V)[None, :]
    state = state_of(table) + (row * H + head) * (K * V) + d[:, None] * V + e[None, :]
    count = count_of(tl.load(table + COUNTS), row, T)
    s = tl.load(state, mask=tile_mask & (count > 0) if LIVE_ONLY else tile_mask, other=0.0)  # [K, V]
    a = None if A is None else tl.load(A + head).to(tl.float32)
    dt_bias = None if bias is None else load_decay(bias, head, d, K, True, BY_CHANNEL)
    begin(PDL)
    q += row * q_row + head // SHARED * K + d
    k += row * k_row + head // SHARED * K + d
    v += row * v_row + head * V + e
    g += row * g_row
    beta += row * beta_row + head
    out += row * T * H * V + head * V + e
    for first in range(0, T, GROUP):
        qs, ks, vs, gs, betas, zs = (), (), (), (), (), ()
        for i in tl.static_range(GROUP):
            t, exists = first + i, first + i < T
            qs += (tl.load(q + t * q_token, mask=(d < K) & exists, other=0.0).to(tl.float32),)
            ks += (tl.load(k + t * k_token, mask=(d < K) & exists, other=0.0).to(tl.float32),)
            vs += (tl.load(v + t * v_token, mask=e_mask & exists, other=0.0).to(tl.float32),)
            gs += (load_decay(g + t * g_token, head, d, K, exists, BY_CHANNEL),)
            betas += (tl.load(beta + t * beta_token, mask=exists, other=0.0).to(tl.float32),)
            if gate is not None:
                z = gate + row * gate_row + t * gate_token + head * V + e
                zs += (tl.load(z, mask=e_mask & exists, other=0.0).to(tl.float32),)
        for i in tl.static_range(GROUP):
            t, real = first + i, first + i < count
            qi, ki, gi, strength = delta_inputs(qs[i], ks[i], gs[i], betas[i], a, dt_bias, scale, UNIT, DOUBLED)
            if ready_q is not None:
                at = ((row * T + t) * (H // SHARED) + head // SHARED) * K + d
                tl.store(ready_q + at, qi, mask=(d < K) & (t < T))
                tl.store(ready_k + at, ki, mask=(d < K) & (t < T))
            at = (row * T + t) * H + head
            if ready_g is not None:
                if BY_CHANNEL:
                    tl.store(ready_g + at * K + d, gi, mask=(d < K) & (t < T))
                else:
                    tl.store(ready_g + at, gi, mask=t < T)
            if ready_beta is not None:
                tl.store(ready_beta + at, strength, mask=t < T)
            new, y = delta_token(s, qi, ki, vs[i], gi, strength, BY_CHANNEL)
            s = tl.where(real, new, s)
            if gate is not None:
                y *= zs[i] * tl.sigmoid(zs[i])
            tl.store(out + t * H * V, tl.where(real, y, 0.0), mask=e_mask & (t < T))
    if WRITE:
        tl.store(state, s, mask=tile_mask & (count > 0))


def gated_delta_step(
    inputs: Tensors,
    constants: Tensors,
    table: Tensor,
    *,
    unit: bool = False,
    gates: tuple[Tensor, Tensor] | None = None,
    doubled: bool = False,
    gate: Tensor | None = None,
    write: bool = True,
    ready: Tensors | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Delta: q, k [B, T, Hk, K], v [B, T, H, V], g, beta [B, T, H]; the state is [B, H, K, V] -> [B, T, H, V].

    With g [B, T, H, K] every key channel has its own decay (`ChannelDelta`).

    unit   q and k are normalized to length one, and q is then divided by √K
    gates  (A [H], dt_bias [H] or [H, K]): g and beta are as projected; the rule takes A · softplus(g + dt_bias)
           and sigmoid(beta)
    doubled   beta is then doubled
    gate   z [B, T, H, V]: multiplies by silu(z), in the dtype of z
    ready  `q` and `k`, `g` and `beta` in it are filled with the inputs of the rule itself
    """
    q, k, v, g, beta = (contiguous_tokens(inputs[name]) for name in ("q", "k", "v", "g", "beta"))
    rows, tokens, heads, value = v.shape
    key_heads, key = k.shape[2:]
    A, bias = gates or (None, None)
    z = None if gate is None else contiguous_tokens(gate)
    out = torch.empty(rows, tokens, heads, value, dtype=output_dtype(v, None, gate), device=v.device)
    by_channel = g.dim() == 4
    tile, live_only = tile_for(ChannelDelta if by_channel else GatedDelta, rows * heads * key * value, tile)
    tall = triton.next_power_of_2(key)
    block = min(max(tile.values // tall, 1), triton.next_power_of_2(value))
    launch(
        _gated_delta, (triton.cdiv(value, block), heads, rows),
        q, k, v, g, beta, A, bias, z, key**-0.5, out, table,
        *((ready or {}).get(name) for name in ("q", "k", "g", "beta")),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride()[:2], *beta.stride()[:2],
        *row_and_token_strides(z), tokens,
        heads, key, value, heads // key_heads, unit, by_channel, doubled, block, tall,
        tokens_together(tokens), live_only, write,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
