"""SSD (Mamba-2) over many tokens: three launches, whose products run on tensor cores.

    1. `_ssd_decays`    step sizes and sums of log decays inside each chunk
    2. `_ssd_states`    the state at the start of each chunk, one chunk after the other, and the new state; programs
                        divide a head's state [P, N], which holds enough tiles to fill a GPU
    3. `_ssd_outputs`   all chunks in parallel: scores C B^T, times decays, times x; plus C times the state at the start

Scores C B^T are the same for all heads of a group, so a program of launch 3 computes them once for several heads.
Operands of products have the inputs' dtype, and sums are float32. Scratch memory is the state at the start of each
chunk, in bfloat16 if the inputs are, else in float32, and three or four float32 values per token and head.

Reference: `lamina.recurrence.SSD.chunk`.
"""

# Kernels gather tensors in tuples that grow:
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.cache.packed_rows import PackedRows
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, fitted, limits_of
from lamina.kernels.recurrent.state import bounds, contiguous_tokens, output_dtype, row_and_token_strides, step_size
from lamina.recurrence import SSD
from lamina.recurrence.rule import Tensors

LOG2E = tl.constexpr(1.4426950408889634)
GONE = tl.constexpr(-150.0)  # a decay of 2^-150 is 0 in float32; below, sums would only lose digits
SHORT = 1024  # tokens of a row: with no more, shorter chunks give more programs


@dataclass(frozen=True)
class Tile:
    """How the work is divided.

    chunk    tokens of a chunk
    values   of a head's P, for the programs of launch 3; those of launch 2 have `state_tile`
    columns  of the state's N that one product of launch 3 reads
    heads    of a program of launch 3, at most
    """

    chunk: int
    values: int
    columns: int
    heads: int
    warps: int
    stages: int
    state_tile: tuple[int, int]
    state_warps: int
    state_stages: int


def ssd_prompt(
    rule: SSD,
    state: Tensor,
    inputs: Tensors,
    constants: Tensors,
    counts: Tensor | None = None,
    *,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] | None = None,
    packed: PackedRows | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """SSD over T tokens per row: state [B, H, P, N], x [B, T, H, P], dt [B, T, H], B and C [B, T, G, N]; A [H]
    -> (out [B, T, H, P], new state).

    counts    [B]: the tokens of each row; see the package
    skip      D [H]: adds D x, in the dtype that this sum has in PyTorch
    gate      z [B, T, H, P]: multiplies by silu(z), in the dtype of z
    dt_bias   [H]: dt is as projected, and the step size is softplus(dt + dt_bias)
    dt_limit  the step size is then clamped to this range
    packed    the rows are side by side in the inputs [1, N, …], and in the result
    tile      in place of what `tile_for` says
    """
    x = inputs["x"]
    rows, tokens, heads, dim = x.shape
    out = torch.empty(rows, tokens, heads, dim, dtype=output_dtype(x, skip, gate), device=x.device)
    if rows == 0 or tokens == 0:
        return out, state
    exact = torch.promote_types(x.dtype, torch.promote_types(inputs["B"].dtype, inputs["C"].dtype))
    x, B, C = (contiguous_tokens(inputs[name].to(exact)) for name in ("x", "B", "C"))
    dt, z = contiguous_tokens(inputs["dt"]), None if gate is None else contiguous_tokens(gate)
    strides = [row_and_token_strides(one) for one in (dt, x, B, C, z)]
    if packed is not None:
        rows, tokens = len(packed), packed.longest
        strides = [(0, token) for _, token in strides]
    dt_at, x_at, B_at, C_at, z_at = strides
    tile = tile or tile_for(tokens, dim, rule.state, exact, limits_of(x.device))
    L, N, shared = tile.chunk, rule.state, heads // rule.groups
    chunks = triton.cdiv(tokens, L)
    where: tuple[Tensor | None, ...] = (counts, None, None)
    every = rows * chunks
    if packed is not None:
        first, every = packed.pieces(L)
        where = packed.counts, packed.starts, first
    state = state.contiguous()
    new = torch.empty_like(state)

    # Beside the rounding of bfloat16, that of a long sum of logs is small; float32 has its rest in a second tensor.
    parts = 4 if exact == torch.float32 else 3
    sums, steps, weights, *rest = torch.empty(parts, every, heads, L, device=x.device).unbind()
    remainder = rest[0] if rest else None
    kept = torch.bfloat16 if exact == torch.bfloat16 else torch.float32
    starts = torch.empty(every, heads, dim, N, dtype=kept, device=x.device)

    side = min(8, triton.next_power_of_2(heads))
    launch(
        _ssd_decays, (triton.cdiv(heads, side), chunks, rows),
        sums, steps, weights, remainder, dt, constants["A"], dt_bias, *bounds(dt_limit), *where, tokens, chunks,
        *dt_at, H=heads, L=L, HEADS=side, num_warps=4,
    )  # fmt: skip
    values, columns = tile.state_tile
    launch(
        _ssd_states, (triton.cdiv(dim, values) * triton.cdiv(N, columns), heads, rows),
        new, starts, state, x, B, sums, weights, *where, tokens, chunks, *x_at, *B_at,
        H=heads, P=dim, N=N, SHARED=shared, L=L, P_TILE=values, N_TILE=columns,
        num_warps=tile.state_warps, num_stages=tile.state_stages,
    )  # fmt: skip
    parts_of_head = triton.cdiv(dim, tile.values)
    together = heads_together(tile.heads, shared, rows * chunks * heads * parts_of_head, limits_of(x.device))
    launch(
        _ssd_outputs, (heads // together * parts_of_head, chunks, rows),
        out, x, B, C, z, skip, starts, sums, remainder, steps, *where, tokens, chunks, *x_at, *B_at, *C_at, *z_at,
        H=heads, P=dim, N=N, SHARED=shared, HEADS=together, L=L, P_TILE=tile.values, N_TILE=tile.columns,
        WIDE=exact == torch.float16, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, new


def heads_together(most: int, shared: int, programs: int, limits: Limits) -> int:
    """Heads of one program: up to `most` of a group's, while four programs per SM remain; `programs` if each has one.

    >>> from lamina.kernels.limits import CARDS
    >>> [heads_together(8, 80, 80 * chunks, CARDS[90]) for chunks in (4, 32, 64)]
    [1, 4, 8]
    """
    while most > 1 and (shared % most or programs // most < 4 * limits.multiprocessors):
        most //= 2
    return most


@cache
def tile_for(tokens: int, dim: int, state: int, dtype: torch.dtype, limits: Limits) -> Tile:
    """The tile for rows of `tokens` tokens, heads of `dim` values and states of `state` columns."""
    return fitted(_tiles(tokens, dim, state, dtype), lambda one: shared_bytes(one, state, dtype), limits.shared)


def _tiles(tokens: int, dim: int, state: int, dtype: torch.dtype) -> Iterator[Tile]:
    """Tiles, best first. The sizes are those at which registers hold a program without spills."""

    def tile(chunk: int, values: int, columns: int, stages: int, warps: int = 4, side: int = 64) -> Tile:
        values, columns, p, n = (
            min(most, max(16, triton.next_power_of_2(size)))
            for most, size in ((values, dim), (columns, state), (side, dim), (side, state))
        )
        return Tile(chunk, values, columns, 8, warps, stages, (p, n), 4, 3)

    if dtype == torch.float32:  # without tensor cores
        yield tile(32, 16, 32, stages=1, side=32)
        return
    short = min(64, max(16, triton.next_power_of_2(tokens)))
    if dtype == torch.bfloat16:
        if tokens > SHORT and state <= 128:
            yield tile(128, 64, 128, stages=2, warps=8)
        yield tile(short, 64, 128, stages=2)
    yield tile(short, 32, 64, stages=2)
    yield tile(min(short, 32), 32, 64, stages=2)
    yield tile(16, 32, 32, stages=1)


def shared_bytes(tile: Tile, state: int, dtype: torch.dtype) -> int:
    """The most shared memory of a program of launch 2 or 3: loaded blocks, and a tile on its way to be stored."""
    item, L = dtype.itemsize, tile.chunk
    values, columns = tile.state_tile
    ahead = max(tile.state_stages - 1, 1)
    second = L * (ahead * (values * item + 4) + (ahead + 1) * columns * item) + values * columns * 4
    wide = 4 if dtype == torch.float16 else item
    whole = triton.cdiv(state, tile.columns) * tile.columns
    heads = tile.stages * ((L + whole) * tile.values * wide + 16 * L) + L * tile.values * wide
    third = L * whole * wide + max(L * whole * wide, heads)
    return max(second, third)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _count(counts, row, T):
    """The real tokens of a row."""
    count = T
    if counts is not None:
        count = tl.minimum(tl.load(counts + row), T).to(tl.int32)
    return count


@triton.jit
def _real_decays(dt, bias, low, high, a, real):
    """-> (step sizes dt, log2 of decays), zero where there is no token: such a token keeps the state."""
    dt = tl.where(real, step_size(dt.to(tl.float32), bias, low, high), 0.0)
    return dt, tl.where(real, tl.maximum(dt * a * LOG2E, GONE), 0.0)


@triton.jit(do_not_specialize=["T", "K"])
def _ssd_decays(
    sums, steps, weights, remainder,  # float32 [R, K, H, L] for R rows and K chunks; remainder may be None
    dt, A, bias, low, high,  # [R, T, H], [H], [H] or None, bounds of dt or None
    counts, begins, pieces,  # [R] or None: tokens; of `PackedRows`: each row's first token and first chunk
    T, K, dt_row, dt_token,
    H: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, chunk, row): heads i · HEADS … of the chunk. With g the log2 of a token's decay:

        sums[i] (+ remainder[i])   g[0] + … + g[i], rounded to float32 (and what the rounding dropped)
        steps[i]                   dt
        weights[i]                 dt · 2^(g[i + 1] + … + g[L - 1]): how much of token i is in the state at the end

    Summed in float64: a small log decay after a large one keeps its digits in the difference of two sums.
    """
    begin(PDL)
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = _count(counts, row, T)
    i, h = tl.arange(0, L), tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    t, there = chunk * L + i, h < H
    real = (t < count)[:, None] & there[None, :]
    first_chunk = row * K
    if begins is not None:
        dt += tl.load(begins + row) * dt_token
        first_chunk = tl.load(pieces + row)
        if chunk * L >= count:
            return
    a = tl.load(A + h, mask=there, other=0.0).to(tl.float32)[None, :]
    shift = None if bias is None else tl.load(bias + h, mask=there, other=0.0).to(tl.float32)[None, :]
    raw = tl.load(dt + row * dt_row + t.to(tl.int64)[:, None] * dt_token + h[None, :], mask=real, other=0.0)
    size, g = _real_decays(raw, shift, low, high, a, real)
    g = g.to(tl.float64)
    sum = tl.cumsum(g, 0)
    rounded = sum.to(tl.float32)
    after = (tl.sum(g, 0)[None, :] - sum).to(tl.float32)
    at = ((first_chunk + chunk) * H + h[None, :]) * L + i[:, None]
    tl.store(sums + at, rounded, mask=there[None, :])
    tl.store(steps + at, size, mask=there[None, :])
    tl.store(weights + at, size * tl.exp2(tl.minimum(after, 0.0)), mask=there[None, :])
    if remainder is not None:
        tl.store(remainder + at, (sum - rounded.to(tl.float64)).to(tl.float32), mask=there[None, :])


@triton.jit(do_not_specialize=["T", "K"])
def _ssd_states(
    new, starts, state,  # float32 [R, H, P, N]; [R, K, H, P, N]; float32 [R, H, P, N]
    x, B, sums, weights,  # [R, T, H, P], [R, T, G, N], of `_ssd_decays`
    counts, begins, pieces,  # as in `_ssd_decays`
    T, K, x_row, x_token, B_row, B_token,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr,  # SHARED: heads per group
    L: tl.constexpr, P_TILE: tl.constexpr, N_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, head, row): tile i of the head's state [P, N], through all chunks of the row."""
    begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) // tl.cdiv(N, N_TILE) * P_TILE + tl.arange(0, P_TILE)
    n = tl.program_id(0) % tl.cdiv(N, N_TILE) * N_TILE + tl.arange(0, N_TILE)
    i, count = tl.arange(0, L), _count(counts, row, T)
    inside = (p < P)[:, None] & (n < N)[None, :]
    place = p[:, None] * N + n[None, :]
    x += row * x_row + head * P
    B += row * B_row + head // SHARED * N
    first_chunk = row * K
    if begins is not None:
        first, first_chunk = tl.load(begins + row), tl.load(pieces + row)
        x += first * x_token
        B += first * B_token
    mine = (row * H + head) * (P * N)
    h = tl.load(state + mine + place, mask=inside, other=0.0)
    chunks = tl.cdiv(count, L)
    ends = sums + (first_chunk * H + head) * L + L - 1
    decay = tl.load(ends, mask=chunks > 0, other=0.0)
    for k in range(0, chunks):
        # Loaded a chunk ahead: the product would wait for it.
        next_decay = tl.load(ends + (k + 1) * (H * L), mask=k + 1 < chunks, other=0.0)
        t = k * L + i
        real, token = t < count, t.to(tl.int64)
        at = (first_chunk + k) * H + head
        tl.store(starts + at * (P * N) + place, h.to(starts.dtype.element_ty), mask=inside)
        # [P_TILE, L]: the weighted operand is the left one, which tensor cores can read from registers.
        xs = tl.load(x + token[None, :] * x_token + p[:, None], mask=real[None, :] & (p < P)[:, None], other=0.0)
        Bs = tl.load(B + token[:, None] * B_token + n[None, :], mask=real[:, None] & (n < N)[None, :], other=0.0)
        weight = tl.load(weights + at * L + i)
        xs = (xs.to(tl.float32) * weight[None, :]).to(Bs.dtype)
        h = tl.dot(xs, Bs, h * tl.exp2(decay), input_precision="ieee")
        decay = next_decay
    tl.store(new + mine + place, h, mask=inside)


@triton.jit(do_not_specialize=["T", "K"])
def _ssd_outputs(
    out, x, B, C, gate, skip,  # [R, T, H, P] twice, [R, T, G, N] twice, [R, T, H, P] or None, [H] or None
    starts, sums, remainder, steps,  # of the launches before
    counts, begins, pieces,  # as in `_ssd_decays`
    T, K, x_row, x_token, B_row, B_token, C_row, C_token, gate_row, gate_token,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
    L: tl.constexpr, P_TILE: tl.constexpr, N_TILE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, chunk, row): P_TILE values of each of HEADS heads, which are in one group, for the chunk's tokens.

    WIDE: products with scores and states in TF32, which has the digits of float16 and the range of float32.
    """
    begin(PDL)
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first_head = tl.program_id(0) // tl.cdiv(P, P_TILE) * HEADS
    p = tl.program_id(0) % tl.cdiv(P, P_TILE) * P_TILE + tl.arange(0, P_TILE)
    i, count = tl.arange(0, L), _count(counts, row, T)
    t = chunk * L + i
    token, real, has_p = t.to(tl.int64), t < count, (p < P)[None, :]
    first, first_chunk, written = row * T, row * K, (t < T)[:, None] & has_p
    if begins is not None:
        first, first_chunk, written = tl.load(begins + row), tl.load(pieces + row), real[:, None] & has_p
        if chunk * L >= count:
            return
        x += first * x_token
        B += first * B_token
        C += first * C_token
        if gate is not None:
            gate += first * gate_token
    out += (first + token)[:, None] * (H * P) + p[None, :]
    if chunk * L >= count:
        for part in range(0, HEADS):
            tl.store(out + (first_head + part) * P, tl.zeros([L, P_TILE], out.dtype.element_ty), mask=written)
        return

    scores, Cs = tl.zeros([L, L], tl.float32), ()
    B += row * B_row + first_head // SHARED * N
    C += row * C_row + first_head // SHARED * N
    for j in tl.static_range((N + N_TILE - 1) // N_TILE):
        n = j * N_TILE + tl.arange(0, N_TILE)
        c = tl.load(C + token[:, None] * C_token + n[None, :], mask=real[:, None] & (n < N)[None, :], other=0.0)
        b = tl.load(B + token[None, :] * B_token + n[:, None], mask=real[None, :] & (n < N)[:, None], other=0.0)
        scores = tl.dot(c, b, scores, input_precision="ieee")
        Cs += (c.to(tl.float32) if WIDE else c,)
    before = i[:, None] >= i[None, :]

    precision: tl.constexpr = "tf32" if WIDE else "ieee"
    x += row * x_row + token[:, None] * x_token + p[None, :]
    starts += p[None, :] * N
    for part in range(0, HEADS):
        head = first_head + part
        at = (first_chunk + chunk) * H + head
        xs = tl.load(x + head * P, mask=real[:, None] & has_p, other=0.0)
        sum, step = tl.load(sums + at * L + i), tl.load(steps + at * L + i)
        y = tl.zeros([L, P_TILE], tl.float32)
        for j in tl.static_range((N + N_TILE - 1) // N_TILE):
            n = j * N_TILE + tl.arange(0, N_TILE)
            h = tl.load(starts + at * (P * N) + n[:, None], mask=(n < N)[:, None] & has_p, other=0.0)
            y = tl.dot(Cs[j], h, y, input_precision=precision)
        y *= tl.exp2(sum)[:, None]
        between = sum[:, None] - sum[None, :]
        if remainder is not None:
            rest = tl.load(remainder + at * L + i)
            between += rest[:, None] - rest[None, :]
        # Later tokens are masked after exp2, whose value there may be infinite.
        weighted = tl.where(before, scores * tl.exp2(between) * step[None, :], 0.0)
        v = xs.to(tl.float32) if WIDE else xs
        y = tl.dot(weighted.to(v.dtype), v, y, input_precision=precision)
        if skip is not None:
            y += tl.load(skip + head).to(tl.float32) * xs.to(tl.float32)
        if gate is not None:
            z = gate + row * gate_row + token[:, None] * gate_token + head * P + p[None, :]
            z = tl.load(z, mask=real[:, None] & has_p, other=0.0).to(tl.float32)
            y *= z * tl.sigmoid(z)
        tl.store(out + head * P, tl.where(real[:, None], y, 0.0).to(out.dtype.element_ty), mask=written)
