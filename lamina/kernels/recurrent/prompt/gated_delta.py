"""The gated delta rule over prompts, in chunks of 64 tokens: two launches for any number of tokens.

With S the state [K, V] before a chunk, and for its tokens l and s

    between[l, s] = exp(g[s + 1] + … + g[l]) for s <= l, else 0
    since[l] = exp(g[0] + … + g[l])             until[s] = between[last, s]

the corrections u [L, V] of a chunk, its outputs y and the state after it are

    u = solve · (v - since · k S)               solve = (1 + strictly lower part of beta (k kᵀ) between)⁻¹ · diag(beta)
    y = since · q S + scores · u                scores = (q kᵀ) between
    S = since[last] · S + kᵀ (until · u)

1. `_chunk_matrices` computes `solve`, `scores`, `since` and `until` of all chunks in parallel.
2. `_walk_chunks` carries the state from chunk to chunk: a program holds V_BLOCK columns of one head's state in float32.

Chunks without a real token are skipped, and tokens that are not real are loaded as zeros, which change no state.

Inputs of 16 bits go to the tensor cores as they are. A float32 factor of such a product (the state, the corrections,
the inverse) is the sum of two values of 16 bits, its rounded value and the rest, so that it keeps 16 bits of precision
and a product costs two. Float32 inputs are multiplied as three products of tf32, which is float32's precision.

The reference is `lamina.recurrence.GatedDelta`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.cache.packed_rows import PackedRows
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, fitted, limits_of
from lamina.recurrence import GatedDelta
from lamina.recurrence.rule import Tensors

DIAGONAL = tl.constexpr(16)  # rows of the diagonal blocks that are inverted by forward substitution


@dataclass(frozen=True)
class Walk:
    """Columns of the state that one program holds, its warps, and pipeline stages of its loads."""

    block: int
    warps: int
    stages: int


def gated_delta_prompt(
    rule: GatedDelta,
    state: Tensor,
    inputs: Tensors,
    constants: Tensors,
    counts: Tensor | None,
    *,
    packed: PackedRows | None = None,
    walk: Walk | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, Hk, K], v [B, T, H, V], g, beta [B, T, H], state [B, H, K, V] -> (out [B, T, H, V], new state)

    packed   the rows are side by side in the inputs [1, N, …], and in the result
    walk     in place of what `walk_for` says
    """
    q, k, v, g, beta = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs[n] for n in rule.input_shapes))
    rows, tokens, heads, value = v.shape
    if tokens == 0:
        return torch.zeros_like(v), state
    key, shared = rule.key_dim, heads // rule.key_heads
    itemsize, device = v.element_size(), v.device
    length, parts = chunk_length(itemsize), 1 if itemsize == 4 else 2
    out = torch.empty(rows, tokens, heads, value, dtype=v.dtype, device=device)
    where: tuple[Tensor | None, ...] = (counts, None, None)
    q_at, k_at, v_at = (x.stride()[:3] for x in (q, k, v))
    g_at, beta_at = (x.stride()[:2] for x in (g, beta))
    if packed is not None:
        rows, tokens, (first, most) = len(packed), packed.longest, packed.pieces(length)
        where = packed.counts, packed.starts, first
        q_at, k_at, v_at, g_at, beta_at = ((0, *at[1:]) for at in (q_at, k_at, v_at, g_at, beta_at))
    chunks = triton.cdiv(tokens, length)
    every = rows * chunks if packed is None else most
    new = torch.empty(rows, heads, key, value, dtype=torch.float32, device=device)
    solve = torch.empty(every, heads, parts, length, length, dtype=v.dtype, device=device)
    scores = torch.empty_like(solve)
    decays = torch.empty(every, heads, 2, length, dtype=torch.float32, device=device)
    tall = max(16, triton.next_power_of_2(key))
    sizes = dict(H=heads, SHARED=shared, K=key, K_BLOCK=tall, L=length, PARTS=parts)
    launch(
        _chunk_matrices, (chunks * heads, rows),
        solve, scores, decays, q, k, g, beta, *where, tokens, chunks, *q_at, *k_at, *g_at, *beta_at,
        **sizes, num_warps=4, num_stages=1,
    )  # fmt: skip
    walk = walk or walk_for(rows * heads, tall, value, itemsize, limits_of(device))
    launch(
        _walk_chunks, (triton.cdiv(value, walk.block) * heads, rows),
        out, new, state.contiguous(), solve, scores, decays, q, k, v, *where, tokens, chunks, *q_at, *k_at, *v_at,
        **sizes, V=value, V_BLOCK=walk.block, num_warps=walk.warps, num_stages=walk.stages,
    )  # fmt: skip
    return out, new


@cache
def walk_for(states: int, tall: int, value: int, itemsize: int, limits: Limits) -> Walk:
    """How `_walk_chunks` runs: narrow tiles for few states [K, V], so that every SM has a program."""
    widest = max(16, triton.next_power_of_2(value))
    many = states * triton.cdiv(value, 64) >= 2 * limits.multiprocessors
    block = min(widest, 64 if many and limits.tiles_of_64 and itemsize == 2 else 32)  # elsewhere 64 need more registers
    smaller = [Walk(b, 4, stages) for b in (block, block // 2) if b >= 16 for stages in (3, 2, 1)]
    return fitted(smaller, lambda one: shared_bytes(one, tall, itemsize, limits), limits.shared)


def chunk_length(itemsize: int) -> int:
    """Tokens in a chunk: with more of float32, programs would need more registers than there are."""
    return 32 if itemsize == 4 else 64


def shared_bytes(walk: Walk, tall: int, itemsize: int, limits: Limits) -> int:
    """A program's shared memory: a chunk's inputs and matrices, for each stage, and the state as a factor."""
    length, parts = chunk_length(itemsize), 1 if itemsize == 4 else 2
    factor = tall * max(walk.block * 4, length * itemsize) + 2048
    if walk.stages == 1 and not limits.tiles_of_64:  # loaded to registers
        return factor
    inputs = length * (2 * tall + walk.block + 2 * parts * length) * itemsize
    return limits.buffers(walk.stages, length) * inputs + factor


@triton.jit
def _dot(a, b):
    """a · b, of one dtype, in float32."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _add_product(total, a, x):
    """total + a · x, with x in float32 and a in any dtype: x is two values of that dtype."""
    high = x.to(a.dtype)
    total = tl.dot(a, high, total, input_precision="tf32x3")
    if a.dtype != tl.float32:
        total = tl.dot(a, (x - high.to(tl.float32)).to(a.dtype), total)
    return total


@triton.jit
def _product(x, y, PARTS: tl.constexpr):
    """x · y of float32 matrices: PARTS 1 in float32's precision, PARTS 2 with factors of 16 bits."""
    if PARTS == 1:
        return _dot(x, y)
    else:
        a, b = x.to(tl.bfloat16), y.to(tl.bfloat16)
        total = tl.dot((x - a.to(tl.float32)).to(tl.bfloat16), b)
        total = tl.dot(a, (y - b.to(tl.float32)).to(tl.bfloat16), total)
        return tl.dot(a, b, total)


@triton.jit
def _store_parts(pointer, x, inside, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Stores x in float32 as PARTS values of the pointer's dtype, SIZE values apart."""
    high = x.to(pointer.dtype.element_ty)
    tl.store(pointer + inside, high)
    if PARTS == 2:
        tl.store(pointer + SIZE + inside, (x - high.to(tl.float32)).to(pointer.dtype.element_ty))


@triton.jit
def _count(counts, row, T):
    """Real tokens of a row."""
    return T if counts is None else tl.minimum(tl.load(counts + row).to(tl.int32), T)


@triton.jit
def _inverse(x, L: tl.constexpr, PARTS: tl.constexpr):
    """(1 + x)⁻¹ of a strictly lower triangular x [L, L], in float32.

    Forward substitution inverts the diagonal blocks; then two inverted neighbours a and b, with n of x below a, make
    the inverse of the block that has both: its part below a is - b⁻¹ n a⁻¹.
    """
    N: tl.constexpr = L // DIAGONAL
    one, other = tl.arange(0, N), tl.arange(0, DIAGONAL)
    diagonal = (one[:, None] == one[None, :])[:, None, :, None]
    blocks = tl.where(diagonal, tl.reshape(x, [N, DIAGONAL, N, DIAGONAL]), 0.0)
    across = tl.permute(tl.sum(blocks, 2), (0, 2, 1))  # [N, s, l]: every block transposed
    y = tl.where(other[:, None] == other[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(across)  # [N, l, s]
    for i in range(1, DIAGONAL):
        weights = tl.sum(tl.where((other == i)[None, None, :], across, 0.0), 2)  # [N, s]: row i of each block
        found = tl.sum(weights[:, :, None] * y, 1)  # [N, s]
        y = tl.where((other == i)[None, :, None], y - found[:, None, :], y)
    y = tl.where(diagonal, y[:, :, None, :], 0.0)  # [N, l, N, s]
    y = tl.reshape(y, [L, L])
    a = tl.arange(0, L)
    for level in tl.static_range(2):
        size = DIAGONAL << level
        if size < L:
            pair = a[:, None] // (2 * size) == a[None, :] // (2 * size)
            below = tl.where(pair & (a[:, None] // size != a[None, :] // size), x, 0.0)
            y -= _product(_product(y, below, PARTS), y, PARTS)
    return y


@triton.jit
def _chunk_matrices(
    solve, scores, decays,  # [R, CHUNKS, H, PARTS, L, L] twice, float32 [R, CHUNKS, H, 2, L]: since, until
    q, k, g, beta,  # [R, T, H / SHARED, K] twice, [R, T, H] twice, for R rows
    counts, starts, pieces,  # [R] or None: tokens; of `PackedRows`: each row's first token and first chunk
    T, CHUNKS, q_row, q_token, q_head, k_row, k_token, k_head, g_row, g_token, beta_row, beta_token,  # strides
    H: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, L: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk · H + head, row)"""
    begin(PDL)
    chunk, head, row = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1).to(tl.int64)
    count = _count(counts, row, T)
    if chunk * L < count:
        a, d = tl.arange(0, L), tl.arange(0, K_BLOCK)
        first_chunk = row * CHUNKS
        if starts is not None:
            begins, first_chunk = tl.load(starts + row), tl.load(pieces + row)
            q += begins * q_token
            k += begins * k_token
            g += begins * g_token
            beta += begins * beta_token
        t = (chunk * L + a).to(tl.int64)
        real = t < count
        inside = real[:, None] & (d < K)[None, :]
        q += row * q_row + (head // SHARED) * q_head
        k += row * k_row + (head // SHARED) * k_head
        keys = tl.load(k + t[:, None] * k_token + d[None, :], mask=inside, other=0.0)
        queries = tl.load(q + t[:, None] * q_token + d[None, :], mask=inside, other=0.0)
        logs = tl.load(g + row * g_row + t * g_token + head, mask=real, other=0.0).to(tl.float32)
        strengths = tl.load(beta + row * beta_row + t * beta_token + head, mask=real, other=0.0).to(tl.float32)

        # Every interval is summed by itself: a difference of two sums would lose small decays behind a large one.
        sums = tl.cumsum(tl.where(a[:, None] > a[None, :], logs[:, None], 0.0), 0)
        between = tl.where(a[:, None] >= a[None, :], tl.exp(sums), 0.0)  # [l, s]
        at = (first_chunk + chunk) * H + head
        tl.store(decays + at * 2 * L + a, tl.exp(tl.cumsum(logs, 0)))
        tl.store(decays + (at * 2 + 1) * L + a, tl.sum(tl.where((a == L - 1)[:, None], between, 0.0), 0))
        cell = a[:, None] * L + a[None, :]
        _store_parts(scores + at * PARTS * L * L, _dot(queries, tl.trans(keys)) * between, cell, PARTS, L * L)
        mixing = _dot(keys, tl.trans(keys)) * between * strengths[:, None]
        inverse = _inverse(tl.where(a[:, None] > a[None, :], mixing, 0.0), L, PARTS)
        _store_parts(solve + at * PARTS * L * L, inverse * strengths[None, :], cell, PARTS, L * L)


@triton.jit
def _walk_chunks(
    out, new, state,  # [R, T, H, V], float32 [R, H, K, V] twice
    solve, scores, decays,  # as `_chunk_matrices` stores them
    q, k, v,  # [R, T, H / SHARED, K] twice, [R, T, H, V]
    counts, starts, pieces,  # as in `_chunk_matrices`
    T, CHUNKS, q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,  # strides
    H: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, L: tl.constexpr,
    PARTS: tl.constexpr, V: tl.constexpr, V_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i · H + head, row): columns i · V_BLOCK … of the head's state, over all chunks."""
    begin(PDL)
    head, row = tl.program_id(0) % H, tl.program_id(1).to(tl.int64)
    a, d, e = tl.arange(0, L), tl.arange(0, K_BLOCK), tl.program_id(0) // H * V_BLOCK + tl.arange(0, V_BLOCK)
    count = _count(counts, row, T)
    held = (d < K)[:, None] & (e < V)[None, :]
    place = (row * H + head) * (K * V) + d[:, None] * V + e[None, :]
    s = tl.load(state + place, mask=held, other=0.0)  # [K, V]
    q += row * q_row + (head // SHARED) * q_head + d[None, :]
    k += row * k_row + (head // SHARED) * k_head + d[None, :]
    v += row * v_row + head * v_head + e[None, :]
    begins, first_chunk, end = row * T, row * CHUNKS, T
    if starts is not None:
        begins, first_chunk, end = tl.load(starts + row), tl.load(pieces + row), count
        q += begins * q_token
        k += begins * k_token
        v += begins * v_token
    out += (begins * H + head) * V + e[None, :]
    cell = a[:, None] * L + a[None, :]
    for i in range(0, tl.cdiv(count, L)):
        t = (i * L + a).to(tl.int64)
        real = (t < count)[:, None]
        keys = tl.load(k + t[:, None] * k_token, mask=real & (d < K)[None, :], other=0.0)  # [L, K]
        queries = tl.load(q + t[:, None] * q_token, mask=real & (d < K)[None, :], other=0.0)
        values = tl.load(v + t[:, None] * v_token, mask=real & (e < V)[None, :], other=0.0)  # [L, V]
        at = (first_chunk + i) * H + head
        since = tl.load(decays + at * 2 * L + a)[:, None]
        until = tl.load(decays + (at * 2 + 1) * L + a)[:, None]
        kept = tl.load(decays + at * 2 * L + L - 1)
        first, rest = at * PARTS * L * L + cell, (at * PARTS + 1) * L * L + cell
        solver = tl.load(solve + first)  # [L, L]
        score = tl.load(scores + first)

        nothing = tl.zeros([L, V_BLOCK], tl.float32)
        left = values.to(tl.float32) - since * _add_product(nothing, keys, s)
        y = since * _add_product(nothing, queries, s)
        u = _add_product(nothing, solver, left)
        if PARTS == 2:
            u = tl.dot(tl.load(solve + rest), left.to(solver.dtype), u)
        y = _add_product(y, score, u)
        if PARTS == 2:
            y = tl.dot(tl.load(scores + rest), u.to(score.dtype), y)
        s = _add_product(kept * s, tl.trans(keys), until * u)
        tl.store(out + t[:, None] * (H * V), y.to(out.dtype.element_ty), mask=real & (e < V)[None, :])
    tl.store(new + place, s, mask=held)
    for first in range(count, end, L):
        t = (first + a).to(tl.int64)
        tl.store(out + t[:, None] * (H * V), tl.zeros([L, V_BLOCK], out.dtype.element_ty),
                 mask=(t < end)[:, None] & (e < V)[None, :])  # fmt: skip
