"""Recurrent rules for a few tokens a row: every state is read once and written once, in place.

The time of a decode step of a recurrent layer is that of moving its states. No rule mixes two rows of its state matrix
(two columns, for the gated delta), so a program takes a tile of one head's state into registers, applies the T new
tokens to it one after the other, and puts it back. The tokens' inputs are small and come from the cache of the device;
those of up to four tokens are asked for together, so that T tokens do not wait T times.

The state is found through the cache's `table` (int64 [8]: [0] the state [B, *state_shape] in float32, [6] the counts
[B] or 0), so a captured launch serves any cache. Row b takes its first counts[b] tokens. With none its state is not
touched at all; outputs past its count are zero. (Inputs past it are read but never used: reading them must not wait for
the counts.)

What model code computes around a rule one small operation at a time can be done here on the way in or out, where a
keyword is given; without keywords a function is `Rule.scan` in place. References: `lamina.recurrence`.

The table, the counts, the state and the parameters are read before waiting for the launch just before, which hides the
time to reach them. So that launch must not be one that writes them: in a layer it is the mixer's convolution or a
product. `mixer.py` has the convolution in front and the gated norm behind in the same kernel, for one token a row.
"""

# Kernels gather tensors in tuples that grow:
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.entry import COUNTS, STORE, count_of
from lamina.kernels.launch import begin, launch
from lamina.recurrence import SSD, GatedDelta, Rule, SelectiveScan
from lamina.recurrence.rule import Tensors


class Tile(NamedTuple):
    """The part of a state that one program holds."""

    numbers: int
    warps: int


MANY = 2**22  # numbers of state from which a launch is bound by bandwidth; below, by the time to reach them
TILES = {  # (rule, many numbers of state in all)
    (SSD, False): Tile(1024, 4),
    (SSD, True): Tile(4096, 4),
    (SelectiveScan, False): Tile(256, 2),
    (SelectiveScan, True): Tile(1024, 4),
    (GatedDelta, False): Tile(2048, 4),
    (GatedDelta, True): Tile(4096, 4),
}


def recur_step(rule: Rule, inputs: Tensors, constants: Tensors, table: Tensor, **around: Any) -> Tensor:
    """The rule's own `scan` on the state behind `table`, in place: inputs [B, T, *shape] -> outputs [B, T, ...].

    around   what the rule's `before` and `after` do, in the same kernel; `write=False` leaves the state as it was
    """
    match rule:
        case SSD():
            return ssd_step(inputs, constants, table, **around)
        case SelectiveScan():
            return selective_scan_step(inputs, constants, table, **around)
        case GatedDelta():
            return gated_delta_step(inputs, constants, table, **around)
    raise InputError(
        f"no kernel for the rule {rule}; there is one for SSD, SelectiveScan and GatedDelta, or use rule.scan"
    )


# -- what the kernels share ------------------------------------------------------------------------------------------


@triton.jit
def state_of(table):
    # A pointer read from memory carries no alignment by itself; with it, four numbers move at a time.
    return tl.multiple_of(tl.load(table + STORE).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def softplus(x):
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log(u) · e / (u - 1) keeps the digits of a small e that 1 + e drops.
    small = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def step_size(dt, bias, low, high):
    if bias is not None:
        dt = softplus(dt + bias)
    if low is not None:
        dt = tl.maximum(dt, low)
    if high is not None:
        dt = tl.minimum(dt, high)
    return dt


def tile_for(rule: type[Rule], numbers: int, tile: Tile | None) -> tuple[Tile, bool]:
    """What a program holds, and whether states of rows without tokens are left unread, though that takes a look at the
    counts first: worth it where the time is that of moving bytes, not that of reaching them."""
    many = numbers >= MANY
    return tile or TILES[rule, many], many


def _together(tokens: int) -> int:
    """How many tokens' inputs are asked for at once."""
    return min(4, triton.next_power_of_2(tokens))


def by_token(x: Tensor) -> Tensor:
    """[B, T, *shape] of any strides, such that the numbers of one token lie together."""
    return x if x[0, 0].is_contiguous() else x.contiguous()


# -- SSD -------------------------------------------------------------------------------------------------------------


@triton.jit
def ssd_token(h, x, size, B, C, a):
    """h [P, N], x [P], B and C [N], the step size and the decay A of the head -> the new h, and y [P]"""
    h = tl.exp(size * a) * h + (size * x)[:, None] * B[None, :]
    return h, tl.sum(h * C[None, :], axis=1)


@triton.jit
def _ssd(
    x, dt, B, C, A, skip, gate, bias, low, high, out, table,
    x_row, x_token, dt_row, dt_token, B_row, B_token, C_row, C_token, gate_row, gate_token,
    T: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LIVE_ONLY: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
    here, inside = p < P, (p < P)[:, None] & (n < N)[None, :]
    at = state_of(table) + (row * H + head) * (P * N) + p[:, None] * N + n[None, :]
    count = count_of(tl.load(table + COUNTS), row, T)
    h = tl.load(at, mask=inside & (count > 0) if LIVE_ONLY else inside, other=0.0)  # [P, N]
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
            t, given = first + i, first + i < T
            xs += (tl.load(x + t * x_token, mask=here & given, other=0.0).to(tl.float32),)
            dts += (tl.load(dt + t * dt_token, mask=given, other=0.0).to(tl.float32),)
            Bs += (tl.load(B + t * B_token, mask=(n < N) & given, other=0.0).to(tl.float32),)
            Cs += (tl.load(C + t * C_token, mask=(n < N) & given, other=0.0).to(tl.float32),)
            if gate is not None:
                z = gate + row * gate_row + t * gate_token + head * P + p
                zs += (tl.load(z, mask=here & given, other=0.0).to(tl.float32),)
        for i in tl.static_range(GROUP):
            t, real = first + i, first + i < count
            size = step_size(dts[i], dt_bias, low, high)
            new, y = ssd_token(h, xs[i], size, Bs[i], Cs[i], a)
            h = tl.where(real, new, h)
            if D is not None:
                y += D * xs[i]
            if gate is not None:
                y *= zs[i] * tl.sigmoid(zs[i])
            tl.store(out + t * H * P, tl.where(real, y, 0.0), mask=here & (t < T))
    if WRITE:
        tl.store(at, h, mask=inside & (count > 0))


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
    tile: Tile | None = None,
) -> Tensor:
    """SSD: x [B, T, H, P], dt [B, T, H], B and C [B, T, G, N]; A [H]; the state is [B, H, P, N] -> [B, T, H, P].

    skip      D [H]: y + D x, in the dtype that this sum has in PyTorch
    gate      z [B, T, H, P]: y · silu(z), in the dtype of z
    dt_bias   [H]: dt is as projected, and softplus(dt + dt_bias) is meant
    dt_limit  the range that step sizes are then held to
    """
    x, dt, B, C = (by_token(inputs[name]) for name in ("x", "dt", "B", "C"))
    rows, tokens, heads, dim = x.shape
    state = B.shape[3]
    z = None if gate is None else by_token(gate)
    out = torch.empty(rows, tokens, heads, dim, dtype=_out_dtype(x, skip, gate), device=x.device)
    tile, live_only = tile_for(SSD, rows * heads * dim * state, tile)
    wide = triton.next_power_of_2(state)
    block = min(max(tile.numbers // wide, 1), triton.next_power_of_2(dim))
    launch(
        _ssd, (triton.cdiv(dim, block), heads, rows),
        x, dt, B, C, constants["A"], skip, z, dt_bias, *bounds(dt_limit), out, table,
        *x.stride()[:2], *dt.stride()[:2], *B.stride()[:2], *C.stride()[:2], *_strides(z), tokens,
        heads, dim, state, heads // B.shape[2], block, wide, _together(tokens), live_only, write,
        num_warps=tile.warps,
    )  # fmt: skip
    return out


def _out_dtype(x: Tensor, skip: Tensor | None, gate: Tensor | None) -> torch.dtype:
    if gate is not None:
        return gate.dtype
    return x.dtype if skip is None else torch.promote_types(x.dtype, skip.dtype)


def bounds(limit: tuple[float, float] | None) -> tuple[float | None, float | None]:
    """Step sizes are never negative and always finite: a limit of 0 or of infinity is none."""
    low, high = limit or (0.0, float("inf"))
    return None if low == 0 else low, None if high == float("inf") else high


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


# -- selective scan --------------------------------------------------------------------------------------------------


@triton.jit
def _selective_scan(
    x, dt, B, C, A, skip, gate, bias, out, table,
    x_row, x_token, dt_row, dt_token, B_row, B_token, C_row, C_token, gate_row, gate_token,
    T: tl.constexpr, CHANNELS: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LIVE_ONLY: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    c, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N_BLOCK)
    here, inside = c < CHANNELS, (c < CHANNELS)[:, None] & (n < N)[None, :]
    within = c[:, None] * N + n[None, :]
    at = state_of(table) + row * (CHANNELS * N) + within
    count = count_of(tl.load(table + COUNTS), row, T)
    h = tl.load(at, mask=inside & (count > 0) if LIVE_ONLY else inside, other=0.0)  # [C, N]
    a = tl.load(A + within, mask=inside, other=0.0).to(tl.float32)
    dt_bias = None if bias is None else tl.load(bias + c, mask=here, other=0.0).to(tl.float32)
    D = None if skip is None else tl.load(skip + c, mask=here, other=0.0).to(tl.float32)
    begin(PDL)
    x += row * x_row + c
    dt += row * dt_row + c
    B += row * B_row + n
    C += row * C_row + n
    out += row * T * CHANNELS + c
    for first in range(0, T, GROUP):
        xs, dts, Bs, Cs, zs = (), (), (), (), ()
        for i in tl.static_range(GROUP):
            t, given = first + i, first + i < T
            xs += (tl.load(x + t * x_token, mask=here & given, other=0.0).to(tl.float32),)
            dts += (tl.load(dt + t * dt_token, mask=here & given, other=0.0).to(tl.float32),)
            Bs += (tl.load(B + t * B_token, mask=(n < N) & given, other=0.0).to(tl.float32),)
            Cs += (tl.load(C + t * C_token, mask=(n < N) & given, other=0.0).to(tl.float32),)
            if gate is not None:
                z = gate + row * gate_row + t * gate_token + c
                zs += (tl.load(z, mask=here & given, other=0.0).to(tl.float32),)
        for i in tl.static_range(GROUP):
            t, real = first + i, first + i < count
            size = step_size(dts[i], dt_bias, None, None)
            h = tl.where(real, tl.exp(size[:, None] * a) * h + (size * xs[i])[:, None] * Bs[i][None, :], h)
            y = tl.sum(h * Cs[i][None, :], axis=1)  # [C]
            if D is not None:
                y += D * xs[i]
            if gate is not None:
                y *= zs[i] * tl.sigmoid(zs[i])
            tl.store(out + t * CHANNELS, tl.where(real, y, 0.0), mask=here & (t < T))
    if WRITE:
        tl.store(at, h, mask=inside & (count > 0))


def selective_scan_step(
    inputs: Tensors,
    constants: Tensors,
    table: Tensor,
    *,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    dt_bias: Tensor | None = None,
    write: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """Selective scan: x and dt [B, T, C], B and C [B, T, N]; A [C, N]; the state is [B, C, N] -> [B, T, C].

    skip     D [C]: y + D x, in the dtype that this sum has in PyTorch
    gate     z [B, T, C]: y · silu(z), in the dtype of z
    dt_bias  [C]: dt is as projected, and softplus(dt + dt_bias) is meant
    """
    x, dt, B, C = (by_token(inputs[name]) for name in ("x", "dt", "B", "C"))
    rows, tokens, channels = x.shape
    state = B.shape[2]
    z = None if gate is None else by_token(gate)
    out = torch.empty(rows, tokens, channels, dtype=_out_dtype(x, skip, gate), device=x.device)
    tile, live_only = tile_for(SelectiveScan, rows * channels * state, tile)
    wide = triton.next_power_of_2(state)
    block = min(max(tile.numbers // wide, 1), triton.next_power_of_2(channels))
    launch(
        _selective_scan, (triton.cdiv(channels, block), rows),
        x, dt, B, C, constants["A"], skip, z, dt_bias, out, table,
        *x.stride()[:2], *dt.stride()[:2], *B.stride()[:2], *C.stride()[:2], *_strides(z), tokens,
        channels, state, block, wide, _together(tokens), live_only, write,
        num_warps=tile.warps,
    )  # fmt: skip
    return out


# -- gated delta -----------------------------------------------------------------------------------------------------


@triton.jit
def delta_token(s, q, k, v, g, beta, a, dt_bias, scale, UNIT: tl.constexpr):
    """s [K, V], q and k [K], v [V], and of the head: log decay and strength, as projected where there is a bias
    -> the new s, and y [V]"""
    if UNIT:
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
    if dt_bias is not None:
        g = a * softplus(g + dt_bias)
        beta = tl.sigmoid(beta)
    # y = S^T q with the corrected S is decay · S^T q + (k·q) u: both looks at the state are taken at once.
    decay = tl.exp(g)
    known = tl.sum(k[:, None] * s, axis=0)  # [V]
    asked = tl.sum(q[:, None] * s, axis=0)
    u = beta * (v - decay * known)
    return decay * s + k[:, None] * u[None, :], decay * asked + tl.sum(k * q, axis=0) * u


@triton.jit
def _gated_delta(
    q, k, v, g, beta, A, bias, gate, scale, out, table,
    q_row, q_token, k_row, k_token, v_row, v_token, g_row, g_token, beta_row, beta_token, gate_row, gate_token,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SHARED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LIVE_ONLY: tl.constexpr, WRITE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d, e = tl.arange(0, K_BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here, inside = e < V, (d < K)[:, None] & (e < V)[None, :]
    at = state_of(table) + (row * H + head) * (K * V) + d[:, None] * V + e[None, :]
    count = count_of(tl.load(table + COUNTS), row, T)
    s = tl.load(at, mask=inside & (count > 0) if LIVE_ONLY else inside, other=0.0)  # [K, V]
    a = None if A is None else tl.load(A + head).to(tl.float32)
    dt_bias = None if bias is None else tl.load(bias + head).to(tl.float32)
    begin(PDL)
    q += row * q_row + head // SHARED * K + d
    k += row * k_row + head // SHARED * K + d
    v += row * v_row + head * V + e
    g += row * g_row + head
    beta += row * beta_row + head
    out += row * T * H * V + head * V + e
    for first in range(0, T, GROUP):
        qs, ks, vs, gs, betas, zs = (), (), (), (), (), ()
        for i in tl.static_range(GROUP):
            t, given = first + i, first + i < T
            qs += (tl.load(q + t * q_token, mask=(d < K) & given, other=0.0).to(tl.float32),)
            ks += (tl.load(k + t * k_token, mask=(d < K) & given, other=0.0).to(tl.float32),)
            vs += (tl.load(v + t * v_token, mask=here & given, other=0.0).to(tl.float32),)
            gs += (tl.load(g + t * g_token, mask=given, other=0.0).to(tl.float32),)
            betas += (tl.load(beta + t * beta_token, mask=given, other=0.0).to(tl.float32),)
            if gate is not None:
                z = gate + row * gate_row + t * gate_token + head * V + e
                zs += (tl.load(z, mask=here & given, other=0.0).to(tl.float32),)
        for i in tl.static_range(GROUP):
            t, real = first + i, first + i < count
            new, y = delta_token(s, qs[i], ks[i], vs[i], gs[i], betas[i], a, dt_bias, scale, UNIT)
            s = tl.where(real, new, s)
            if gate is not None:
                y *= zs[i] * tl.sigmoid(zs[i])
            tl.store(out + t * H * V, tl.where(real, y, 0.0), mask=here & (t < T))
    if WRITE:
        tl.store(at, s, mask=inside & (count > 0))


def gated_delta_step(
    inputs: Tensors,
    constants: Tensors,
    table: Tensor,
    *,
    unit: bool = False,
    gates: tuple[Tensor, Tensor] | None = None,
    gate: Tensor | None = None,
    write: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """Gated delta: q, k [B, T, Hk, K], v [B, T, H, V], g, beta [B, T, H]; the state is [B, H, K, V] -> [B, T, H, V].

    unit   q and k are brought to length one, and q is then divided by √K
    gates  (A [H], dt_bias [H]): g and beta are as projected, and A · softplus(g + dt_bias) and sigmoid(beta) are meant
    gate   z [B, T, H, V]: y · silu(z), in the dtype of z
    """
    q, k, v, g, beta = (by_token(inputs[name]) for name in ("q", "k", "v", "g", "beta"))
    rows, tokens, heads, value = v.shape
    key_heads, key = k.shape[2:]
    A, bias = gates or (None, None)
    z = None if gate is None else by_token(gate)
    out = torch.empty(rows, tokens, heads, value, dtype=_out_dtype(v, None, gate), device=v.device)
    tile, live_only = tile_for(GatedDelta, rows * heads * key * value, tile)
    tall = triton.next_power_of_2(key)
    block = min(max(tile.numbers // tall, 1), triton.next_power_of_2(value))
    launch(
        _gated_delta, (triton.cdiv(value, block), heads, rows),
        q, k, v, g, beta, A, bias, z, key**-0.5, out, table,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride()[:2], *beta.stride()[:2], *_strides(z), tokens,
        heads, key, value, heads // key_heads, unit, block, tall, _together(tokens), live_only, write,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
