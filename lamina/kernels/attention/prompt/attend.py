"""Attention of many new tokens per row over a cache's keys and values and over each other, for captured prompts.

As in `decode.py`, a program takes queries of one key head of one row and one split of its visible committed tokens, and
finds everything about the cache through its entry table. Here the queries of a key head are many blocks of M, and new
keys are a second loop: it runs in the last split of a row, over the new tokens that some query of the block sees.

    blocks of queries      r = g · T + t: token t of query head head · G + g
    committed tokens       from the store: a line, a ring, pages (`visible.py`, `slots.py`)
    new tokens             from this pass's tensors, so a ring may be written after the launch

A row is split only if its blocks leave SMs free: short prompts behind long rows. Padding gives zeros. The number of
tokens is no constant of the kernel, so two builds serve all widths: with and without splits.

The reference is `lamina.attention.reference_attention`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.bias import KernelForm
from lamina.attention.window import Full, Window
from lamina.kernels.attention.online_softmax import LOG2E, LOWEST, accumulate, merge_splits, to_scores
from lamina.kernels.attention.prefill.many import Tile, shared_bytes
from lamina.kernels.attention.score_bias import SCORE_BYTES, add_bias, bias_arguments, slopes_of
from lamina.kernels.attention.split_kv import Division, assigned_split, shortest_split, target_splits
from lamina.kernels.attention.visible import first_seen, most_visible, position_of, slot_of, window_arguments
from lamina.kernels.entry import K_STORE, V_STORE, store_pointer
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, fitted, limits_of, smaller
from lamina.kernels.slots import cells_in, first_cell, pages_of, stages_for
from lamina.kernels.workspace import arrivals

MANY = tl.constexpr(1 << 20)  # more new tokens than any pass has
BUNCH = 8  # splits that are merged at once


def attend_prompt(
    q: Tensor,  # [B, Hq, T, D]
    new: tuple[Tensor, Tensor] | None,  # keys [B, Hk, T, D] and values [B, Hk, T, Dv] of this pass; None: a source
    table: Tensor,  # the row of the cache's table for this entry
    kv_heads: int,
    value_dim: int,
    window: Window | None = None,  # None: Full
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    bias: KernelForm | None = None,
    page: int = 0,  # slots per page; 0 without pages
    tile: Tile | None = None,  # in place of what `tile_for` says
) -> Tensor:
    """-> [B, Hq, T, Dv], a view of a tensor [B, T, Hq, Dv]. The last axis of q and of the new tokens is contiguous.

    Without new tokens every query sees all of the row's source (cross-attention).
    """
    B, Hq, T, D = q.shape
    Hk, Dv, window = kv_heads, value_dim, window or Full()
    k, v = (q, q) if new is None else new
    strides = (0,) * 6 if new is None else (*k.stride()[:3], *v.stride()[:3])
    queries, limits = Hq // Hk * T, limits_of(q.device)
    biases, bias_kind = bias_arguments(bias)
    tile = tile or tile_for(queries, D, Dv, q.element_size(), limits, bias_kind)
    blocks = triton.cdiv(queries, tile.queries)
    kind, size, keep = window_arguments(window)
    least = shortest_split(tile.block)
    most = target_splits(B, Hk * blocks, most_visible(window), least, limits.multiprocessors)
    out = torch.empty(B, T, Hq, Dv, dtype=q.dtype, device=q.device)
    division = Division.of(B, Hk * blocks, tile.queries, Dv, most, out)
    M, values = tile.queries, max(16, triton.next_power_of_2(Dv))
    merging = division.constants(M, values, tile.warps)
    if merging["MERGES"]:  # the same for all widths
        merging |= {"BUNCH": BUNCH, "TREE": True, "CHUNK": 1}
    launch(
        _attend_prompt, (Hk * blocks, division.items),
        out, q, k, v, out if sinks is None else sinks, *biases, division.parts, arrivals(q.device), table,
        B, division.wanted, size, keep, least, T, blocks, scale, 1.0 if softcap is None else softcap,
        *q.stride()[:3], *strides,
        G=Hq // Hk, HEADS=Hk, D=D, DV=Dv, D_PAD=max(16, triton.next_power_of_2(D)), DV_PAD=values,
        M=M, KIND=kind, SOFTCAP=softcap is not None, SINKS=sinks is not None, BIAS=bias_kind, NEW=new is not None,
        BLOCK=tile.block, **merging, PAGE=page, num_warps=tile.warps, num_stages=stages_for(tile.stages, page),
    )  # fmt: skip
    return out.transpose(1, 2)


@cache
def tile_for(queries: int, key_dim: int, value_dim: int, itemsize: int, limits: Limits, bias: str = "") -> Tile:
    """The tile for `queries` queries per key head and heads of these sizes."""
    key_dim, value_dim = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    wide = max(key_dim, value_dim)
    if itemsize > 2:
        best = Tile(16, 32, 4, 2)  # without tensor cores
    elif wide > 256:
        best = Tile(32, 32, 8, 2)
    elif wide > 128:
        best = Tile(64, 64, 8, 3)
    else:
        best = Tile(64, 64, 4, 3)
    most = min(best.queries, max(16, triton.next_power_of_2(queries)))

    def need(one: Tile) -> int:
        probabilities = one.queries * one.block * (itemsize + SCORE_BYTES[bias])
        ahead = replace(one, stages=limits.buffers(one.stages, one.queries) + 1)
        return shared_bytes(ahead, key_dim, value_dim, itemsize) + probabilities

    narrower = (one for rows in (most, most // 2) if rows >= 16 for one in smaller(replace(best, queries=rows)))
    return fitted(narrower, need, limits.shared)


@triton.jit(do_not_specialize=["rows", "wanted", "T", "blocks"])  # one kernel for many numbers of rows and tokens
def _attend_prompt(
    out, q, k, v, sinks,  # [B, T, Hq, DV], [B, Hq, T, D], [B, Hk, T, D], [B, Hk, T, DV], [Hq]
    bias, buckets, farthest,  # `score_bias.py`
    parts, counters, table,  # partial results and their counters (`merge_splits`); the entry's table row
    rows, wanted, size, keep, least,  # B; target number of splits; the window; shortest split
    T, blocks, scale, softcap,  # tokens per row; blocks of M queries per key head
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,  # strides
    G: tl.constexpr, HEADS: tl.constexpr,  # G = Hq // Hk, HEADS = Hk
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    M: tl.constexpr, KIND: tl.constexpr,  # queries per program; kind of window
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr, NEW: tl.constexpr,  # NEW: there are new keys
    B: tl.constexpr, MERGES: tl.constexpr, BLOCK: tl.constexpr, BUNCH: tl.constexpr, TREE: tl.constexpr,
    CHUNK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head · blocks + block, item): M queries of one key head over one split of one row. The last blocks,
    which see the most new keys, come first."""
    begin(PDL)
    group = tl.num_programs(0) - 1 - tl.program_id(0)
    head, block = group // blocks, group % blocks
    row, split, n_splits, base, split_tokens, length, count, kept, first, n_visible, ring = assigned_split(
        table, rows, wanted, size, keep, least, MANY, B, KIND, BLOCK
    )
    count = tl.minimum(count, T)
    if split >= n_splits:
        return
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    inner = tl.arange(0, M)
    r = block * M + inner
    t, g = r % T, r // T
    real = (r < G * T) & (t < count)
    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    mix = tl.zeros([M, DV_PAD], tl.float32)
    earliest, latest = tl.min(tl.where(real, t, T)), tl.max(tl.where(real, t, -1))
    if latest < 0:  # padding alone: the same in all splits, so none is waited for
        if split == 0:
            _store(out, top, total, mix, sinks, row, head, r, dv, 0, T, G, HEADS, DV, False)
        return

    origin, pages = first_cell(table, row * HEADS + head, PAGE), pages_of(table, row, PAGE)
    k_store = store_pointer(table, K_STORE, k.dtype) + origin * D
    v_store = store_pointer(table, V_STORE, k.dtype) + origin * DV
    low = first_seen(length + t, size, KIND)  # [M]
    h = (head * G + g)[:, None]
    slopes = slopes_of(bias, h, real[:, None], BIAS)
    at = row * q_row + (head * G + g) * q_head + t * q_token
    queries = tl.load(q + at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)

    # Tokens before `unseen` are outside the windows of all queries of this block, unless they are kept.
    begins = split * split_tokens
    ends = tl.minimum(begins + split_tokens, n_visible)
    unseen = 0
    if KIND != "full":
        lowest = first_seen(length + earliest, size, KIND)
        unseen = tl.where(keep > 0, 0, lowest)
        begins = tl.maximum(begins, tl.maximum(unseen - first, 0) // BLOCK * BLOCK)
    for start in range(begins, ends, BLOCK):
        j = start + tl.arange(0, BLOCK)
        there = (j < ends)[:, None]
        slot = slot_of(j, kept, first, ring, keep, KIND)
        cell = cells_in(pages, head, slot, start, ends, HEADS, PAGE, KIND, BLOCK)
        keys = tl.load(k_store + cell[:, None] * D + d[None, :], mask=there & (d < D)[None, :], other=0.0)
        scores = to_scores(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scale, softcap, SOFTCAP)
        position = position_of(j, kept, first)[None, :]
        if BIAS != "":
            distance = (length + t)[:, None] - position
            scores = add_bias(scores, slopes, bias, buckets, farthest, h, real[:, None], distance, HEADS * G, BIAS)
        seen = (j < ends)[None, :]
        if KIND != "full":
            seen = seen & ((position >= low[:, None]) | (position < keep))
        values = tl.load(v_store + cell[:, None] * DV + dv[None, :], mask=there & (dv < DV)[None, :], other=0.0)
        top, total, mix = accumulate(top, total, mix, scores, seen, values)

    if NEW:
        k += row * k_row + head * k_head
        v += row * v_row + head * v_head
        stop = tl.where(split == n_splits - 1, tl.minimum(latest + 1, count), 0)
        for start in range(tl.maximum(unseen - length, 0) // BLOCK * BLOCK, stop, BLOCK):
            u = start + tl.arange(0, BLOCK)
            there = (u < stop)[:, None]
            new_keys = tl.load(k + u[:, None] * k_token + d[None, :], mask=there & (d < D)[None, :], other=0.0)
            new_scores = to_scores(tl.dot(queries, tl.trans(new_keys), input_precision="ieee"), scale, softcap, SOFTCAP)
            if BIAS != "":
                away = t[:, None] - u[None, :]
                new_scores = add_bias(
                    new_scores, slopes, bias, buckets, farthest, h, real[:, None], away, HEADS * G, BIAS
                )
            sees = (u < stop)[None, :] & (u[None, :] <= t[:, None])
            if KIND != "full":
                new_position = (length + u)[None, :]
                sees = sees & ((new_position >= low[:, None]) | (new_position < keep))
            new_values = tl.load(v + u[:, None] * v_token + dv[None, :], mask=there & (dv < DV)[None, :], other=0.0)
            top, total, mix = accumulate(top, total, mix, new_scores, sees, new_values)

    if n_splits == 1:
        _store(out, top, total, mix, sinks, row, head, r, dv, count, T, G, HEADS, DV, SINKS)
    elif MERGES:
        whole, best, sums, mixed = merge_splits(
            parts, counters, top, total, mix, group, base, split, n_splits, inner, inner, dv,
            M, DV, M, DV_PAD, BUNCH, TREE, CHUNK,
        )  # fmt: skip
        if whole:
            _store(out, best, sums, mixed, sinks, row, head, r, dv, count, T, G, HEADS, DV, SINKS)


@triton.jit
def _store(
    out, top, total, mix, sinks, row, head, r, d, count, T,
    G: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """`online_softmax.store_output` for any T: stores the mean of values of queries r; zeros for padding."""
    t, h, real = r % T, head * G + r // T, r < G * T
    if SINKS:  # one more key per head, with this score and no value
        sink = tl.load(sinks + h, mask=real, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
        mix = mix * tl.exp2(top - higher)[:, None]
    mean = mix / tl.where(total > 0, total, 1.0)[:, None]
    mean = tl.where(((t < count) & (total > 0))[:, None], mean, 0.0)
    at = ((row * T + t) * (HEADS * G) + h)[:, None] * DV + d[None, :]
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=real[:, None] & (d < DV)[None, :])
