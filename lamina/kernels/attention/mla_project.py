"""The projections around attention in the latent space (MLA, absorbed): everything of a decode step around
`mla.decode_latent`.

A head's scores are q_nope · up_k(latent) + q_rope · k_rope. So instead of projecting every latent up to the head, its
query is projected down, q_nope · up_k, and the result of attention, a mean of latents, is projected up once:
up_v(mean).

    into_latent      norms the new tokens' latents, rotates their keys and stores them; rotates and projects the queries
    out_of_latent    merges the splits of attention, and projects them up to each head's values

Both read a weight of a few megabytes once, and start on it while the launch in front still runs: no launch writes it.
A weight is a view of `up` whose last two axes are contiguous. The reference is `Memory.attend_latent` over
`lamina.cache.layers.attention.LatentLayer`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.attention.decode import MOST_QUERIES
from lamina.kernels.attention.mla import LatentSplits, selected_tokens
from lamina.kernels.attention.online_softmax import LOWEST
from lamina.kernels.attention.rope_append import slot_at, slot_pointer
from lamina.kernels.attention.split_kv import divide
from lamina.kernels.attention.visible import visible, window_arguments
from lamina.kernels.entry import STORE, row_of
from lamina.kernels.gemm.epilogue import arrive
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import KIB, Limits, limits_of
from lamina.kernels.workspace import COUNTERS, PARTS, scratch

STRETCH = 128  # bytes of a latent that one program projects a head's queries to
ALONE = 8  # new tokens up to which each token is projected out by its own programs: its splits are many
COLUMNS = 64  # values of a latent that one such program merges


# -- in --------------------------------------------------------------------------------------------------------------


@triton.jit
def rotate_pairs(at, one, two, cosine, sine, mask):
    """The pairs (at[one], at[two]), rotated, in float32."""
    a = tl.load(at + one, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + two, mask=mask, other=0.0).to(tl.float32)
    return a * cosine - b * sine, b * cosine + a * sine


@triton.jit
def store_token(
    q, kv, weight, cos, sin, q_out, new, table, n, eps,  # as for `_into_latent`; n: the token
    q_row, q_head, q_token, kv_row, kv_token, rope_row, rope_token,
    T: tl.constexpr, H: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, PAIRS: tl.constexpr,
    H_PAD: tl.constexpr, RANK_PAD: tl.constexpr, PAIRS_PAD: tl.constexpr, NEIGHBOURS: tl.constexpr,
    WRITE: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """New token n: norms its latent, rotates its key and the rotary part of its queries, stores all three."""
    WIDTH: tl.constexpr = RANK + 2 * PAIRS
    DTYPE: tl.constexpr = new.dtype.element_ty
    row, t = n // T, n % T
    length, count = row_of(table, row, T)
    real = t < count
    slot = slot_pointer(table, STORE, new, row, 0, tl.where(real, slot_at(table, length + t), 0), real, 1, WIDTH, PAGE)
    c, i, h = tl.arange(0, RANK_PAD), tl.arange(0, PAIRS_PAD), tl.arange(0, H_PAD)[:, None]
    inside, rotates = c < RANK, i < PAIRS
    factor = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    if NEIGHBOURS:
        one, two = 2 * i, 2 * i + 1
    else:
        one, two = i, PAIRS + i
    begin(PDL)
    x, y = kv + row * kv_row + t * kv_token, new + n * WIDTH
    angle = row * rope_row + t * rope_token + i
    cosine, sine = tl.load(cos + angle, mask=rotates, other=0.0), tl.load(sin + angle, mask=rotates, other=0.0)
    latent = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    a, b = rotate_pairs(x + RANK, one, two, cosine, sine, rotates)
    heads = q + row * q_row + t * q_token + h * q_head + NOPE
    of_heads = (h < H) & rotates[None, :]
    q_a, q_b = rotate_pairs(heads, one[None, :], two[None, :], cosine[None, :], sine[None, :], of_heads)

    normed = latent * tl.rsqrt(tl.sum(latent * latent) / RANK + eps) * factor
    tl.store(y + c, normed.to(DTYPE), mask=inside)
    tl.store(y + RANK + one, a.to(DTYPE), mask=rotates)
    tl.store(y + RANK + two, b.to(DTYPE), mask=rotates)
    if WRITE:
        tl.store(slot + c, normed.to(DTYPE), mask=inside & real)
        tl.store(slot + RANK + one, a.to(DTYPE), mask=rotates & real)
        tl.store(slot + RANK + two, b.to(DTYPE), mask=rotates & real)
    z = q_out + (n * H + h) * WIDTH + RANK
    tl.store(z + one[None, :], q_a.to(DTYPE), mask=of_heads)
    tl.store(z + two[None, :], q_b.to(DTYPE), mask=of_heads)


@triton.jit
def project_queries(
    q, up, q_out, index, N, q_row, q_head, q_token, up_head,  # as for `_into_latent`; index: head and stretch
    T: tl.constexpr, H: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, RANK: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head's queries of ROWS new tokens, projected down to COLS columns of the latent."""
    STRETCHES: tl.constexpr = (RANK + COLS - 1) // COLS
    h, first = index // STRETCHES % H, index // (STRETCHES * H) * ROWS
    k, c = tl.arange(0, NOPE_PAD), index % STRETCHES * COLS + tl.arange(0, COLS)
    at = up + h.to(tl.int64) * up_head + k[:, None] * RANK + c[None, :]
    w = tl.load(at, mask=(k < NOPE)[:, None] & (c < RANK)[None, :], other=0.0)  # [NOPE, COLS]
    begin(PDL)
    if ROWS == 1:
        x = tl.load(q + first // T * q_row + first % T * q_token + h * q_head + k, mask=k < NOPE, other=0.0)
        y = tl.sum(w.to(tl.float32) * x.to(tl.float32)[:, None], 0)
        tl.store(q_out + (first * H + h) * WIDTH + c, y.to(q_out.dtype.element_ty), mask=c < RANK)
    else:
        n = first + tl.arange(0, ROWS)
        here = q + (n // T * q_row + n % T * q_token + h * q_head)[:, None] + k[None, :]
        xs = tl.load(here, mask=(n < N)[:, None] & (k < NOPE)[None, :], other=0.0)
        ys = tl.dot(xs, w, input_precision="ieee")
        there = q_out + ((n * H + h) * WIDTH)[:, None] + c[None, :]
        tl.store(there, ys.to(q_out.dtype.element_ty), mask=(n < N)[:, None] & (c < RANK)[None, :])


@triton.jit
def _into_latent(
    q, kv, up, weight,  # [B, H, T, NOPE + 2 · PAIRS], [B, T, RANK + 2 · PAIRS], [H, NOPE, RANK], [RANK]
    cos, sin, q_out, new,  # [B, T, PAIRS] twice, [B, T, H, RANK + 2 · PAIRS], [B, T, RANK + 2 · PAIRS]
    table, N, eps,  # the entry's table row; B · T tokens
    q_row, q_head, q_token, kv_row, kv_token, up_head, rope_row, rope_token,  # strides
    T: tl.constexpr, H: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, PAIRS: tl.constexpr,
    H_PAD: tl.constexpr, NOPE_PAD: tl.constexpr, RANK_PAD: tl.constexpr, PAIRS_PAD: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,  # tokens, and columns of the latent, of a program that projects
    NEIGHBOURS: tl.constexpr, WRITE: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first N programs take one new token each, the others one head and one stretch of the latent."""
    program = tl.program_id(0)
    if program < N:
        store_token(
            q, kv, weight, cos, sin, q_out, new, table, program, eps,
            q_row, q_head, q_token, kv_row, kv_token, rope_row, rope_token,
            T, H, NOPE, RANK, PAIRS, H_PAD, RANK_PAD, PAIRS_PAD, NEIGHBOURS, WRITE, PAGE, PDL,
        )  # fmt: skip
    else:
        project_queries(
            q, up, q_out, program - N, N, q_row, q_head, q_token, up_head,
            T, H, NOPE, NOPE_PAD, RANK, RANK + 2 * PAIRS, ROWS, COLS, PDL,
        )  # fmt: skip


def into_latent(
    q: Tensor,  # [B, H, T, N + P]
    kv: Tensor,  # [B, T, rank + P]: latent and rotary key, as the down projection gives them
    up: Tensor,  # [H, N, rank]: projects a latent up to each head's key
    weight: Tensor,  # [rank], of the latent's norm
    eps: float,
    rope: tuple[Tensor, Tensor],  # cos and sin, float32 [B, T, P / 2]
    table: Tensor,  # the row of the cache's table for this entry
    *,
    neighbours: bool = False,
    write: bool = True,
    stretch: int = STRETCH,
    page: int = 0,  # slots per page; 0 without pages
) -> tuple[Tensor, Tensor]:
    """-> (the queries as `decode_latent` takes them [B, H, T, rank + P], the new tokens [B, T, rank + P]).

    With `write`, real new tokens go to their slots: in a line any number of them, in a ring one. The last axis of q and
    kv is contiguous. `neighbours` rotates pairs (2i, 2i + 1) instead of (i, i + P / 2). `stretch` is for measuring
    other configurations.
    """
    B, H, T, D = q.shape
    (_, nope, rank), pairs, N = up.shape, rope[0].shape[-1], B * T
    if nope + 2 * pairs != D or kv.shape[-1] != rank + 2 * pairs:
        raise InputError(
            f"queries of {D} values and latents with keys of {kv.shape[-1]}, but the up projection has {nope} x {rank} "
            f"and RoPE rotates {2 * pairs}"
        )
    q_out = torch.empty(B, T, H, rank + 2 * pairs, dtype=q.dtype, device=q.device)
    new = torch.empty(B, T, rank + 2 * pairs, dtype=q.dtype, device=q.device)
    rows = 1 if N == 1 else min(max(16, triton.next_power_of_2(N)), MOST_QUERIES[q.element_size()])
    columns = max(16, min(stretch // q.element_size(), triton.next_power_of_2(rank)))
    launch(
        _into_latent, (N + H * triton.cdiv(rank, columns) * triton.cdiv(N, rows),),
        q, kv, up, weight, *rope, q_out, new, table, N, eps,
        *q.stride()[:3], *kv.stride()[:2], up.stride(0), *rope[0].stride()[:2],
        T=T, H=H, NOPE=nope, RANK=rank, PAIRS=pairs, H_PAD=triton.next_power_of_2(H),
        NOPE_PAD=max(16, triton.next_power_of_2(nope)), RANK_PAD=triton.next_power_of_2(rank),
        PAIRS_PAD=triton.next_power_of_2(pairs), ROWS=rows, COLS=columns, NEIGHBOURS=neighbours,
        WRITE=write, PAGE=page, num_warps=4,
    )  # fmt: skip
    return q_out.transpose(1, 2), new


# -- out -------------------------------------------------------------------------------------------------------------


@triton.jit
def splits_of(
    table, row, t, most, size, keep, least,
    T: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """How many splits token t of the row has, as `_attend_latent` made them; 0 for padding."""
    length, count = row_of(table, row, T)
    _kept, _first, n_visible, _ring = visible(table, length, count, size, keep, KIND)
    if TOP:
        n_visible = selected_tokens(length, count, t, TOP)
    _split_tokens, n_splits = divide(n_visible, most, least, BLOCK)
    return tl.where(t < count, n_splits, 0)


@triton.jit
def query_of(row, t, h, T: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, TOP: tl.constexpr):
    """Where `_attend_latent` has the query of head h of token t: -> (index of its group, index in that)."""
    if TOP:
        return ((row * T + t) * BLOCKS + h // M).to(tl.int64), h % M + t * 0
    else:
        r = h * T + t
        return (row * BLOCKS + r // M).to(tl.int64), r % M


@triton.jit
def _out_alone(
    out, means, levels,  # [B, T, H, V], [B · BLOCKS, most, QUERIES, RANK], [B · BLOCKS, QUERIES, most]
    up,  # [H, V, RANK]
    table, sums, arrived,  # the entry's table row; scratch [N, H, STRETCHES, V] and counters [N, H], for N = B · T
    most, size, keep, least, up_head,  # splits per group at most; the window; shortest split; stride
    T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, RANK: tl.constexpr,
    M: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,  # queries per block: padded, stored; blocks per row
    PARTS: tl.constexpr, COLS: tl.constexpr,  # splits that are loaded together; values of the latent per program
    KIND: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h · STRETCHES + stretch, token): merges COLS values of one head's mean latent, and projects them up.

    That gives a share of all V values. The programs of a head meet as in `gemm/epilogue.py`, and the last adds the
    shares, in a fixed order.
    """
    STRETCHES: tl.constexpr = (RANK + COLS - 1) // COLS
    h, stretch, n = tl.program_id(0) // STRETCHES, tl.program_id(0) % STRETCHES, tl.program_id(1)
    c, v = stretch * COLS + tl.arange(0, COLS)[None, :], tl.arange(0, V_PAD)
    at_w = up + h.to(tl.int64) * up_head + v[:, None] * RANK + c
    w = tl.load(at_w, mask=(v < V)[:, None] & (c < RANK), other=0.0)  # [V, COLS]
    row, t = n // T, n % T
    n_splits = splits_of(table, row, t, most, size, keep, least, T, KIND, BLOCK, TOP)
    group, query = query_of(row, t, h, T, M, BLOCKS, TOP)
    begin(PDL)

    top, total = LOWEST, 0.0
    mixed = tl.zeros([COLS], tl.float32)
    for start in range(0, n_splits, PARTS):
        part = start + tl.arange(0, PARTS)
        there = part < n_splits
        level = tl.load(levels + (group * QUERIES + query) * most + part, mask=there, other=LOWEST)
        at = means + ((group * most + part) * QUERIES + query)[:, None] * RANK + c
        mean = tl.load(at, mask=there[:, None] & (c < RANK), other=0.0)  # [PARTS, COLS]
        higher = tl.maximum(top, tl.max(level, axis=0))
        rescale, prob = tl.exp2(top - higher), tl.where(there, tl.exp2(level - higher), 0.0)
        total = total * rescale + tl.sum(prob, axis=0)
        mixed = mixed * rescale + tl.sum(prob[:, None] * mean.to(tl.float32), axis=0)
        top = higher
    merged = mixed / tl.where(total > 0, total, 1.0)
    y = tl.sum(w.to(tl.float32) * merged[None, :], axis=1)  # [V]
    token_head = n * H + h
    sums += token_head * STRETCHES * V
    tl.store(sums + stretch * V + v, y, mask=v < V)
    if arrive(arrived, token_head, STRETCHES):
        y = tl.zeros([V_PAD], tl.float32)
        for s in tl.static_range(STRETCHES):
            y += tl.load(sums + s * V + v, mask=v < V, other=0.0, cache_modifier=".cg")
        tl.store(out + token_head * V + v, y.to(out.dtype.element_ty), mask=v < V)


@triton.jit
def _out_of_latent(
    out, means, levels,  # [B, T, H, V], [B · BLOCKS, most, QUERIES, RANK], [B · BLOCKS, QUERIES, most]
    up,  # [H, V, RANK]
    table, N, most, size, keep, least, up_head,  # the entry's table row; B · T tokens; the rest as for `_out_alone`
    T: tl.constexpr, H: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    M: tl.constexpr, QUERIES: tl.constexpr, BLOCKS: tl.constexpr,  # queries per block: padded, stored; blocks per row
    ROWS: tl.constexpr, VALUES: tl.constexpr,  # tokens and values per program
    KIND: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h · STRETCHES + stretch, i): VALUES values of one head, for tokens i · ROWS …, merged split by split."""
    STRETCHES: tl.constexpr = (V + VALUES - 1) // VALUES
    h, first = tl.program_id(0) // STRETCHES, tl.program_id(1) * ROWS
    v, c = tl.program_id(0) % STRETCHES * VALUES + tl.arange(0, VALUES), tl.arange(0, RANK_PAD)[None, :]
    at_w = up + h.to(tl.int64) * up_head + v[:, None] * RANK + c
    w = tl.load(at_w, mask=(v < V)[:, None] & (c < RANK), other=0.0)  # [VALUES, RANK]
    n = first + tl.arange(0, ROWS)
    row, t = tl.minimum(n, N - 1) // T, n % T
    n_splits = splits_of(table, row, t, most, size, keep, least, T, KIND, BLOCK, TOP)
    n_splits = tl.where(n < N, n_splits, 0)  # [ROWS]
    begin(PDL)

    group, query = query_of(row, t, h, T, M, BLOCKS, TOP)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, RANK_PAD], tl.float32)
    for part in tl.range(0, tl.max(n_splits, axis=0), 1, num_stages=STAGES):
        there = part < n_splits
        level = tl.load(levels + (group * QUERIES + query) * most + part, mask=there, other=LOWEST)
        at = means + ((group * most + part) * QUERIES + query)[:, None] * RANK + c
        mean = tl.load(at, mask=there[:, None] & (c < RANK), other=0.0)  # [ROWS, RANK]
        higher = tl.maximum(top, level)
        rescale, prob = tl.exp2(top - higher), tl.exp2(level - higher)
        total = total * rescale + prob
        mixed = mixed * rescale[:, None] + prob[:, None] * mean.to(tl.float32)
        top = higher
    merged = mixed / tl.where(total > 0, total, 1.0)[:, None]
    y = tl.dot(merged.to(w.dtype), tl.trans(w), input_precision="ieee")
    here = out + ((n * H + h) * V)[:, None] + v[None, :]
    tl.store(here, y.to(out.dtype.element_ty), mask=(n < N)[:, None] & (v < V)[None, :])


def out_of_latent(
    splits: LatentSplits, up: Tensor, table: Tensor, *, columns: int = COLUMNS, stages: int = 4
) -> Tensor:
    """Merges the splits and projects each head's mean latent up to its values -> [B, H, T, V]. Padding gives zeros.

    up [H, V, rank]; `table` is the one that the splits were made with. `columns` (values of a token's latent per
    program) and `stages` are for measuring other configurations.
    """
    B, H, T, M = splits.rows, splits.heads, splits.tokens, splits.queries
    _groups, most, queries, rank = splits.means.shape
    V, N = up.shape[1], B * T
    kind, size, keep = window_arguments(splits.window)
    out = torch.empty(B, T, H, V, dtype=up.dtype, device=up.device)
    common: dict[str, Any] = dict(
        T=T, H=H, V=V, RANK=rank, M=M, QUERIES=queries, BLOCKS=splits.blocks, KIND=kind, BLOCK=splits.block,
        TOP=splits.top, num_warps=8,
    )  # fmt: skip
    columns = min(columns, max(16, triton.next_power_of_2(rank)))
    stretches = triton.cdiv(rank, columns)
    if N <= ALONE and N * H <= COUNTERS and N * H * stretches * V <= PARTS:
        launch(
            _out_alone, (H * stretches, N),
            out, splits.means, splits.levels, up, table, *scratch(up.device), most, size, keep, splits.least,
            up.stride(0), V_PAD=triton.next_power_of_2(V), PARTS=min(128, triton.next_power_of_2(most)), COLS=columns,
            **common,
        )  # fmt: skip
    else:
        limits = limits_of(up.device)
        rows, wide = 16, max(16, triton.next_power_of_2(rank))
        values = values_for(H * triton.cdiv(N, rows), V, rank * up.element_size(), limits)
        stages = stages_for(stages, rows, values, wide, up.element_size(), limits.shared)
        launch(
            _out_of_latent, (H * triton.cdiv(V, values), triton.cdiv(N, rows)),
            out, splits.means, splits.levels, up, table, N, most, size, keep, splits.least, up.stride(0),
            RANK_PAD=wide, ROWS=rows, VALUES=values, STAGES=stages, **common,
        )  # fmt: skip
    return out.transpose(1, 2)


def values_for(heads: int, V: int, width: int, limits: Limits) -> int:
    """Values per program where several tokens share one: every program of a head merges all of its splits, so as many
    values as leave one program per SM, and as fit a program's registers with weight rows of `width` bytes."""
    values = 16
    while heads * triton.cdiv(V, 2 * values) >= limits.multiprocessors and 2 * values * width <= 1 << 16:
        values *= 2
    return values


def stages_for(stages: int, rows: int, values: int, rank: int, itemsize: int, room: int) -> int:
    """The most stages, up to `stages`, that `room` bytes of shared memory hold. In float32 the weight stays in shared
    memory while splits are loaded.

    >>> stages_for(4, 16, 32, 512, 2, 99 * 1024), stages_for(4, 16, 32, 512, 4, 99 * 1024)
    (4, 2)
    """
    part, weight = rows * rank * itemsize, values * rank * itemsize

    def need(some: int) -> int:
        parts = part * (some - 1)
        return (parts + weight if itemsize == 4 else max(parts, weight)) + KIB

    return next((some for some in range(stages, 2, -1) if need(some) <= room), 2)
