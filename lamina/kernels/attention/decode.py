"""Decode attention: up to 16 new tokens per row over a cache's keys and values, each key and value read once.

One program takes one key head of one row and one split of its visible tokens (`split_kv.py`). The G query heads of that
key head times the T new tokens are the rows of a matrix product, so grouped heads (GQA) share one read. New keys and
values come from this pass's tensors, committed ones from the store; over a source (cross-attention) there are no new
ones, and every query sees all. Whether the store is a line or a ring, its address
and each row's length are read on the device from the cache's entry table, so one captured launch serves every cache and
length.

The reference is `lamina.attention.reference_attention`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.bias import KernelForm
from lamina.attention.window import Full, Window
from lamina.errors import InputError
from lamina.kernels.attention.online_softmax import LOWEST, accumulate, merge_splits, store_output, to_scores
from lamina.kernels.attention.score_bias import SCORE_BYTES, add_bias, bias_arguments, slopes_of
from lamina.kernels.attention.split_kv import Division, assigned_split, shortest_split, target_splits
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.attention.visible import (
    MOST_NEW,
    first_seen,
    most_visible,
    position_of,
    slot_of,
    window_arguments,
)
from lamina.kernels.eligibility import head_bytes, why_no_heads
from lamina.kernels.entry import K_STORE, V_STORE, store_pointer
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import KIB, Limits, first_fit, limits_of, smaller
from lamina.kernels.slots import cells_in, first_cell, pages_of, stages_for
from lamina.kernels.workspace import arrivals

# By bytes of one token's key and value in one head, each padded to a power of two.
SHAPES = {
    128: Tiling(128, 4, 4),
    256: Tiling(128, 4, 3),
    512: Tiling(64, 4, 3),
    1024: Tiling(32, 8, 3),
    2048: Tiling(16, 4, 3),
}
# Queries per program, by bytes per value; more queries of one key head are several programs. Products in float32 run
# without matrix units and need the registers.
MOST_QUERIES = {2: 64, 4: 16}


@cache
def plan_for(
    key_dim: int, value_dim: int, dtype: torch.dtype, queries: int, limits: Limits, bias: str = ""
) -> tuple[int, Tiling]:
    """-> (queries of a key head per program, the shape of the launch)."""
    if reason := why_no_heads(key_dim, value_dim, dtype):
        raise InputError(reason)
    most = min(max(16, triton.next_power_of_2(queries)), MOST_QUERIES[dtype.itemsize])
    for M in (most, most // 2, most // 4):
        shape = shape_for(key_dim, value_dim, dtype, M)
        found = with_room(shape, key_dim, value_dim, dtype, M, MOST_NEW.value, limits.shared, limits, bias)
        if found is not None and M >= 16:
            return M, found
    raise InputError(f"{limits.shared} bytes of shared memory are too few for heads of {key_dim} and {value_dim}")


def shape_for(key_dim: int, value_dim: int, dtype: torch.dtype, queries: int) -> Tiling:
    """The shape for `queries` queries per program, where shared memory has room for it."""
    size = head_bytes(key_dim, value_dim, dtype.itemsize)
    shape = next(SHAPES[most] for most in sorted(SHAPES) if size <= most)
    wide = queries * triton.next_power_of_2(value_dim) > 4096  # an accumulator larger than the registers of 4 warps
    return replace(shape, warps=8) if wide else shape


def with_room(
    shape: Tiling,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    queries: int,
    new: int,
    room: int,
    limits: Limits,
    bias: str = "",
) -> Tiling | None:
    """The shape, or the first smaller one, whose shared memory fits `room` bytes with `queries` queries and `new` new
    tokens; None if none does."""
    size, rows = head_bytes(key_dim, value_dim, dtype.itemsize), max(16, triton.next_power_of_2(queries))
    row = max(16, triton.next_power_of_2(key_dim))

    def need(one: Tiling) -> int:
        """Blocks of keys and values; beside them queries, new tokens, and probabilities for the product with values."""
        beside = new * size + rows * (row + one.block) * dtype.itemsize + rows * one.block * SCORE_BYTES[bias]
        return one.block * size * limits.buffers(one.stages, rows) + beside + 2 * KIB

    return first_fit(smaller(shape), need, room)


@triton.jit(do_not_specialize=["rows", "wanted"])  # one kernel for many numbers of rows
def _attend(
    out, q, k, v, sinks,  # [B, T, Hq, DV], [B, Hq, T, D], [B, Hk, T, D], [B, Hk, T, DV], [Hq]
    bias, buckets, farthest,  # `score_bias.py`
    parts, counters, table,  # partial results and their counters (`merge_splits`); the entry's table row
    rows, wanted, size, keep, least,  # B; target number of splits; the window; shortest split
    scale, softcap,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,  # strides
    T: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr,  # G = Hq // Hk, HEADS = Hk
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,  # queries per program: padded, stored, stored and padded
    QUERIES: tl.constexpr, KIND: tl.constexpr,  # blocks of M queries per key head; kind of window
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr, NEW: tl.constexpr,  # NEW: there are new keys
    B: tl.constexpr, MERGES: tl.constexpr, BLOCK: tl.constexpr, BUNCH: tl.constexpr, TREE: tl.constexpr,
    CHUNK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head · QUERIES + block, item): M queries of one key head over one split of one row."""
    group = tl.program_id(0)
    head, block = group // QUERIES, group % QUERIES
    row, split, n_splits, base, split_tokens, length, count, kept, first, n_visible, ring = assigned_split(
        table, rows, wanted, size, keep, least, T, B, KIND, BLOCK
    )
    if split >= n_splits:
        return
    origin, pages = first_cell(table, row * HEADS + head, PAGE), pages_of(table, row, PAGE)
    k_store = store_pointer(table, K_STORE, k.dtype) + origin * D
    v_store = store_pointer(table, V_STORE, k.dtype) + origin * DV
    begins = split * split_tokens
    ends = tl.minimum(begins + split_tokens, n_visible)
    begin(PDL)

    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    inner = tl.arange(0, M)  # this program's queries: r = g · T + t is token t of query head head · G + g
    r = block * M + inner
    t, g = r % T, r // T
    low = first_seen(length + t, size, KIND)  # [M]
    h, real = (head * G + g)[:, None], (r < G * T)[:, None]
    slopes = slopes_of(bias, h, real, BIAS)
    at = row * q_row + (head * G + g) * q_head + t * q_token
    queries = tl.load(q + at[:, None] + d[None, :], mask=(r < G * T)[:, None] & (d < D)[None, :], other=0.0)
    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    mix = tl.zeros([M, DV_PAD], tl.float32)

    # The last split of a row is the shortest, so it takes the new tokens too: loaded now, together with the first
    # blocks, and used after the loop.
    takes_new = split == n_splits - 1
    u = tl.arange(0, MOST_NEW)
    if NEW:
        is_new = ((u < count) & takes_new)[:, None]
        at_k, at_v = row * k_row + head * k_head + u * k_token, row * v_row + head * v_head + u * v_token
        new_keys = tl.load(k + at_k[:, None] + d[None, :], mask=is_new & (d < D)[None, :], other=0.0)
        new_values = tl.load(v + at_v[:, None] + dv[None, :], mask=is_new & (dv < DV)[None, :], other=0.0)

    for start in range(begins, ends, BLOCK):
        j = start + tl.arange(0, BLOCK)
        there = (j < ends)[:, None]
        slot = slot_of(j, kept, first, ring, keep, KIND)
        cell = cells_in(pages, head, slot, start, ends, HEADS, PAGE, KIND, BLOCK)
        keys = tl.load(k_store + cell[:, None] * D + d[None, :], mask=there & (d < D)[None, :], other=0.0)
        scores = to_scores(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scale, softcap, SOFTCAP)
        if BIAS != "":
            distance = (length + t)[:, None] - position_of(j, kept, first)[None, :]
            scores = add_bias(scores, slopes, bias, buckets, farthest, h, real, distance, HEADS * G, BIAS)
        seen = (j < ends)[None, :]
        if KIND != "full" and T > 1:  # later queries see fewer of the earlier tokens
            p = position_of(j, kept, first)[None, :]
            seen = seen & ((p >= low[:, None]) | (p < keep))
        values = tl.load(v_store + cell[:, None] * DV + dv[None, :], mask=there & (dv < DV)[None, :], other=0.0)
        top, total, mix = accumulate(top, total, mix, scores, seen, values)

    if NEW:  # noqa: SIM102 (a constant: without it nothing below is compiled)
        if takes_new:
            new_scores = to_scores(tl.dot(queries, tl.trans(new_keys), input_precision="ieee"), scale, softcap, SOFTCAP)
            if BIAS != "":
                distance = t[:, None] - u[None, :]
                new_scores = add_bias(new_scores, slopes, bias, buckets, farthest, h, real, distance, HEADS * G, BIAS)
            sees_new = (u < count)[None, :] & (u[None, :] <= t[:, None])
            if KIND != "full":
                new_position = (length + u)[None, :]
                sees_new = sees_new & ((new_position >= low[:, None]) | (new_position < keep))
            top, total, mix = accumulate(top, total, mix, new_scores, sees_new, new_values)

    if n_splits == 1:
        store_output(out, top, total, mix, sinks, out, 0, row, head, r, dv, count, T, G, HEADS, DV, SINKS, False)
    elif MERGES:
        n = tl.arange(0, R)
        whole, best, sums, mixed = merge_splits(
            parts, counters, top, total, mix, group, base, split, n_splits, inner, n, dv,
            ROWS, DV, R, DV_PAD, BUNCH, TREE, CHUNK,
        )  # fmt: skip
        if whole:
            store_output(out, best, sums, mixed, sinks, out, 0, row, head, block * M + n, dv, count,
                         T, G, HEADS, DV, SINKS, False)  # fmt: skip


def decode_attention(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hk, T, D]: of this pass's own tokens
    v: Tensor,  # [B, Hk, T, Dv]
    table: Tensor,  # the row of the cache's table for this entry
    window: Window,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    bias: KernelForm | None = None,
    most_parts: int | None = None,
    shape: Tiling | None = None,
    least: int | None = None,
    page: int = 0,  # slots per page; 0 without pages
) -> Tensor:
    """Attention of up to 16 new tokens per row over the row's committed tokens and themselves -> [B, Hq, T, Dv].

    Only visible slots are read, whatever the store's capacity. Padding gives zeros. The last axis of q, k and v is
    contiguous. The output's memory is [B, T, Hq, Dv], so concatenating the heads afterwards copies nothing.
    `most_parts` (target number of splits), `shape` and `least` are for measuring other configurations.
    """
    tuning: dict[str, Any] = dict(most_parts=most_parts, shape=shape, least=least)
    return _launch(q, (k, v), table, k.shape[1], v.shape[3], window, scale, softcap, sinks, bias, page=page, **tuning)


def attend_source(
    q: Tensor,  # [B, Hq, T, D]
    table: Tensor,  # the row of the cache's table for this entry, whose lengths are those of the sources
    kv_heads: int,
    value_dim: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    **tuning: Any,
) -> Tensor:
    """Cross-attention of up to 16 new tokens per row over the row's source -> [B, Hq, T, Dv].

    Every query sees the whole source, and nothing is stored. Padding, and rows without a source, give zeros. `tuning`:
    as `decode_attention` takes it.
    """
    return _launch(q, None, table, kv_heads, value_dim, Full(), scale, softcap, sinks, None, **tuning)


def _launch(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    table: Tensor,
    Hk: int,
    Dv: int,
    window: Window,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: KernelForm | None,
    *,
    most_parts: int | None = None,
    shape: Tiling | None = None,
    least: int | None = None,
    page: int = 0,
) -> Tensor:
    B, Hq, T, D = q.shape
    k, v = (q, q) if new is None else new
    strides = (0,) * 6 if new is None else (*k.stride()[:3], *v.stride()[:3])
    if not 1 <= T <= MOST_NEW.value:
        raise InputError(
            f"{T} new tokens a row: decode attention takes 1 to {MOST_NEW.value}, use lamina.attention for more"
        )
    queries = Hq // Hk * T
    limits = limits_of(q.device)
    biases, bias_kind = bias_arguments(bias)
    M, own = plan_for(D, Dv, k.dtype, queries, limits, bias_kind)
    blocks = triton.cdiv(queries, M)
    rows = M if blocks > 1 else queries
    least = least or shortest_split((shape or shape_for(D, Dv, k.dtype, M)).block)
    shape = shape or own
    kind, size, keep = window_arguments(window)
    most = most_parts or target_splits(B, Hk * blocks, most_visible(window), least, limits.multiprocessors)
    out = torch.empty(B, T, Hq, Dv, dtype=q.dtype, device=q.device)
    division = Division.of(B, Hk * blocks, rows, Dv, most, out)
    R, values = triton.next_power_of_2(rows), max(16, triton.next_power_of_2(Dv))
    launch(
        _attend, (Hk * blocks, division.items),
        out, q, k, v, out if sinks is None else sinks, *biases, division.parts, arrivals(q.device), table,
        B, division.wanted, size, keep, least, scale, 1.0 if softcap is None else softcap,
        *q.stride()[:3], *strides,
        T=T, G=Hq // Hk, HEADS=Hk, D=D, DV=Dv, D_PAD=max(16, triton.next_power_of_2(D)), DV_PAD=values,
        M=M, ROWS=rows, R=R, QUERIES=blocks, KIND=kind, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        BIAS=bias_kind, NEW=new is not None, BLOCK=shape.block, **division.constants(R, values, shape.warps),
        PAGE=page, num_warps=shape.warps, num_stages=stages_for(shape.stages, page),
    )  # fmt: skip
    return out.transpose(1, 2)
