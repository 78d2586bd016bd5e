"""Attention of many queries over any keys: what a View shows, without a query × key mask.

A program computes BLOCK_M queries of one head. It loops over the blocks of keys that `lamina.attention.blocks` lists
for them: first those that every query sees whole, then those inside which the View's rule is applied, from the
positions (and spans or segments) of queries and keys. So causal, sliding, chunked, ragged, packed and bidirectional
attention over lines, rings and whatever else has positions are one kernel. Slots without a token may hold NaN. What
positions do not decide (rules from outside, selections) it reads as bits (`lamina.attention.mask_bits`).

Rows of a packed pass are side by side on one token axis (`PackedRows`): queries are read there and outputs stored
there, keys and values too if they are this pass's own. Positions and the lists of blocks are those of the rows with
padding.

The reference is `lamina.attention.reference_attention`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.bias import KernelForm
from lamina.attention.mask_bits import MaskBits
from lamina.attention.view import View
from lamina.cache.packed_rows import PackedRows
from lamina.kernels.attention.online_softmax import LOG2E, LOWEST
from lamina.kernels.attention.prefill.key_blocks import (
    head_parts,
    kind_of,
    load_keys,
    load_values,
    mask_arguments,
    scores_in_powers,
    shown_by_bits,
    shown_by_position,
)
from lamina.kernels.attention.score_bias import SCORE_BYTES, add_bias, bias_arguments, slopes_of
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, fitted, limits_of, smaller

SHORT = 1024  # queries of a row: with no more, small tiles are faster


@dataclass(frozen=True)
class Tile:
    """Queries of a program, keys per iteration, warps, and pipeline stages of the loop's loads."""

    queries: int
    block: int
    warps: int
    stages: int


def attend_many(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: View,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: KernelForm | None = None,
    tile: Tile | None = None,
    packed: PackedRows | None = None,
    stored: bool = False,
    rest: tuple[Tensor, Tensor] | None = None,
    mask: MaskBits | None = None,
    log_sums: Tensor | None = None,
) -> Tensor:
    """q [B, Hq, T, D], k [B, Hk, S, D], v [B, Hk, S, Dv] -> [B, Hq, T, Dv], a view of a tensor [B, T, Hq, Dv]

    view     without rules from outside and without a selection (`View.positional`), or with its mask as bits
    tile     in place of what `tile_for` says
    packed   q is [1, Hq, N, D] and the result [1, Hq, N, Dv], with the rows of `view` side by side; so are k and v,
             unless they are `stored`, in rows of their own
    rest     more values of each query [B, Hq, T, P] and of each key [B, S, P], the same for all heads, packed where q
             and k are; D and P are powers of two (the rotary part of latent attention)
    """
    Hq, Hk, Dv = q.shape[1], k.shape[1], v.shape[-1]
    D = q.shape[-1] + (0 if rest is None else rest[0].shape[-1])
    B, T, S = view.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if rest is not None:
        rest = rest[0] if rest[0].stride(-1) == 1 else rest[0].contiguous(), rest[1]
    biases, bias_kind = bias_arguments(bias)
    tile = tile or tile_for(T, D, Dv, q.element_size(), limits_of(q.device), bias_kind)
    blocks = view.blocks(tile.queries, tile.block) if mask is None else mask.blocks
    kind, size, keep = kind_of(view.window) if mask is None else ("", 1, 0)
    bits, bits_at = mask_arguments(mask)
    out = q.new_empty(q.shape[0], q.shape[2], Hq, Dv)
    own = packed is not None and not stored
    starts, counts = (None, None) if packed is None else (packed.starts, packed.counts)
    q_row, (k_row, v_row) = q.stride(0) * (packed is None), (x.stride(0) * (not own) for x in (k, v))
    parts = head_parts(D) if rest is None else (q.shape[-1], rest[0].shape[-1])
    beside: tuple[Tensor, Tensor] | tuple[None, None] = (None, None) if rest is None else rest
    beside_at: tuple[int, ...] = (0,) * 5
    if rest is not None:
        rows = rest[0].stride(0) * (packed is None), rest[1].stride(0) * (not own)
        beside_at = (rows[0], *rest[0].stride()[1:3], rows[1], rest[1].stride(1))
    spans, segments = (view.q_spans, view.kv_spans), (view.q_segments, view.kv_segments)
    if mask is not None:
        spans = segments = None, None
    launch(
        _attend_many, (triton.cdiv(T, tile.queries), B * Hq),
        out, log_sums, q, k, v, *beside, view.q_positions, view.kv_positions, *spans, *segments,
        blocks.order, blocks.whole, blocks.seen, bits, sinks, *biases, starts, counts, T, S, size, keep,
        scale * (1 if softcap is not None else LOG2E.value), 1.0 if softcap is None else softcap,
        q_row, *q.stride()[1:3], k_row, *k.stride()[1:3], v_row, *v.stride()[1:3],
        *beside_at, view.q_positions.stride(0), view.kv_positions.stride(0), *bits_at,
        HQ=Hq, G=Hq // Hk, D=D, DV=Dv, FIRST=parts[0], REST=parts[1], DV_PAD=max(16, triton.next_power_of_2(Dv)),
        M=tile.queries, N=tile.block, KIND=kind, CAUSAL=view.causal, SPANS=spans[0] is not None,
        SEGMENTS=segments[0] is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None, BIAS=bias_kind, OWN=own,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out.transpose(1, 2)


@cache
def tile_for(
    queries: int, key_dim: int, value_dim: int, itemsize: int, limits: Limits, bias_kind: str = "", bits: bool = False
) -> Tile:
    """The tile for rows of `queries` queries and heads of these sizes.

    bias_kind   see `score_bias.py`
    bits        the mask is given as bits: tiles of 128 by 128 would spill many registers
    """
    wide = max(sum(head_parts(key_dim)), triton.next_power_of_2(value_dim))
    if itemsize > 2:
        best = Tile(64, 32, 4, 2)
    elif wide > 128 or (bits and wide > 64 and queries > SHORT):
        best = Tile(128, 64, 8, 3)
    elif wide > 64 and queries > SHORT:
        best = Tile(128, 128, 8, 3)
    else:
        best = Tile(64, 64, 4, 3)
    narrower = [one for rows in (best.queries, best.queries // 2) for one in smaller(replace(best, queries=rows))]
    return fitted(narrower, lambda one: needed_bytes(one, key_dim, value_dim, itemsize, bias_kind), limits.shared)


def shared_bytes(tile: Tile, key_dim: int, value_dim: int, itemsize: int) -> int:
    """A program's shared memory: its queries, and the blocks of keys and values that are loaded ahead."""
    keys, values = sum(head_parts(key_dim)), max(16, triton.next_power_of_2(value_dim))
    return (tile.queries * keys + (tile.stages - 1) * tile.block * (keys + values)) * itemsize + 2048


def needed_bytes(tile: Tile, key_dim: int, value_dim: int, itemsize: int, bias_kind: str) -> int:
    """The same with what a bias loads for each score, the number of a bucket and its value; float32 needs some more."""
    buckets = tile.queries * tile.block * SCORE_BYTES[bias_kind] * 3 // 2
    return shared_bytes(tile, key_dim, value_dim, itemsize) + buckets + (4096 if itemsize > 2 else 0)


@triton.jit
def _attend_many(
    out, log_sums, q, k, v,  # [B, T, HQ, DV], [B, T, HQ] or None, [B, HQ, T, D], [B, HQ / G, S, D], [B, HQ / G, S, DV]
    q_rest, k_rest,  # [B, HQ, T, REST], [B, S, REST] if D is in two tensors, which q and k begin; else None
    q_positions, kv_positions, q_spans, kv_spans, q_segments, kv_segments,  # [B, T], [B, S] …
    order, whole, seen,  # [B, NQ, NK], [B, NQ], [B, NQ]: see `Blocks`
    bits,  # [B, NQ · M, NK · N / 8]: see `MaskBits`; None: positions decide
    sinks, bias, buckets, farthest,  # [HQ]; see score_bias.py
    starts, counts,  # [B] of `PackedRows`; None: rows have strides
    T, S, size, keep, scale, softcap,  # window; scale in powers of two unless SOFTCAP
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,  # strides
    q_rest_row, q_rest_head, q_rest_token, k_rest_row, k_rest_token, q_at_row, kv_at_row,
    bits_row, bits_token,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    FIRST: tl.constexpr, REST: tl.constexpr, DV_PAD: tl.constexpr,  # `head_parts`
    M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr,
    SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr,
    OWN: tl.constexpr, PDL: tl.constexpr,  # OWN: keys and values are side by side too
):  # fmt: skip
    """Program (i, b · HQ + h): queries of head h of row b, the last block of the row first: it sees the most keys."""
    begin(PDL)
    n_blocks = tl.num_programs(0)
    block, row, head = n_blocks - 1 - tl.program_id(0), tl.program_id(1) // HQ, tl.program_id(1) % HQ
    row = row.to(tl.int64)
    t, n, d, dv = block * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, FIRST), tl.arange(0, DV_PAD)
    count, begins = T, row * T  # tokens of the row, and where they begin in `out`
    if starts is not None:
        count, begins = tl.load(counts + row).to(tl.int32), tl.load(starts + row)
        if block * M >= count:
            return
        q += begins * q_token
        if q_rest is not None:
            q_rest += begins * q_rest_token
        if OWN:
            k += begins * k_token
            v += begins * v_token
            if k_rest is not None:
                k_rest += begins * k_rest_token
    real = t < count
    e = FIRST + tl.arange(0, REST if REST else 16)
    beside = None
    if k_rest is not None:
        beside = k_rest + row * k_rest_row - FIRST
    q += row * q_row + head * q_head
    k += row * k_row + (head // G) * k_head
    v += row * v_row + (head // G) * v_head
    mine = q + t.to(tl.int64)[:, None] * q_token
    a = tl.load(mine + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    b = a
    if REST:
        if q_rest is not None:
            mine = q_rest + row * q_rest_row + head * q_rest_head - FIRST + t.to(tl.int64)[:, None] * q_rest_token
        b = tl.load(mine + e[None, :], mask=real[:, None] & (e < D)[None, :], other=0.0)
    at = tl.load(q_positions + row * q_at_row + t, mask=real, other=0).to(tl.int32)
    span, segment = at, at
    if SPANS:
        span = tl.load(q_spans + row * T + t, mask=real, other=-1).to(tl.int32)
    if SEGMENTS:
        segment = tl.load(q_segments + row * T + t, mask=real, other=-1).to(tl.int32)
    slopes = slopes_of(bias, t * 0 + head, real, BIAS)

    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    mix = tl.zeros([M, DV_PAD], tl.float32)
    listed = row * n_blocks + block
    n_whole, n_seen = tl.load(whole + listed), tl.load(seen + listed)
    order += listed * tl.cdiv(S, N)
    for i in range(0, n_whole):
        s = tl.load(order + i) * N + n
        x, y = load_keys(k, beside, s.to(tl.int64)[None, :], k_token, k_rest_token, d, e, None, D, FIRST, REST)
        values = load_values(v + s.to(tl.int64)[:, None] * v_token, dv, None, DV, DV_PAD)
        scores = scores_in_powers(a, b, x, y, scale, softcap, REST, SOFTCAP)
        if BIAS != "":
            away = at[:, None] - tl.load(kv_positions + row * kv_at_row + s).to(tl.int32)[None, :]
            scores = add_bias(scores, slopes[:, None], bias, buckets, farthest, head, real[:, None], away, HQ, BIAS)
        higher = tl.maximum(top, tl.max(scores, 1))
        probs, rescale = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        total = total * rescale + tl.sum(probs, 1)
        mix = tl.dot(probs.to(values.dtype), values, mix * rescale[:, None], input_precision="ieee")
        top = higher
    for i in range(n_whole, n_seen):
        s = tl.load(order + i) * N + n
        there = tl.load(kv_positions + row * kv_at_row + s, mask=s < S, other=-1).to(tl.int32)
        held = there >= 0
        x, y = load_keys(k, beside, s.to(tl.int64)[None, :], k_token, k_rest_token, d, e, held[None, :], D, FIRST, REST)
        values = load_values(v + s.to(tl.int64)[:, None] * v_token, dv, held[:, None], DV, DV_PAD)
        scores = scores_in_powers(a, b, x, y, scale, softcap, REST, SOFTCAP)
        if BIAS != "":
            away = at[:, None] - there[None, :]
            scores = add_bias(scores, slopes[:, None], bias, buckets, farthest, head, real[:, None], away, HQ, BIAS)
        if bits is not None:
            shown = shown_by_bits(bits + row * bits_row, t, s, bits_token)
        else:
            shown = shown_by_position(at[:, None], there[None, :], size, keep, KIND, CAUSAL)
        if SPANS:
            other = tl.load(kv_spans + row * S + s, mask=s < S, other=-1).to(tl.int32)
            shown = shown | ((span[:, None] == other[None, :]) & (span >= 0)[:, None])
        if SEGMENTS:
            part = tl.load(kv_segments + row * S + s, mask=s < S, other=-2).to(tl.int32)
            shown = shown & (segment[:, None] == part[None, :])
        scores = tl.where(shown & held[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        probs, rescale = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        total = total * rescale + tl.sum(probs, 1)
        mix = tl.dot(probs.to(values.dtype), values, mix * rescale[:, None], input_precision="ieee")
        top = higher

    if SINKS:  # one more key, with this score and no value
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        rescale = tl.exp2(top - higher)
        total, mix = total * rescale + tl.exp2(sink - higher), mix * rescale[:, None]
    if log_sums is not None:
        sums = (top + tl.log2(tl.where(total > 0, total, 1.0))) / LOG2E
        tl.store(log_sums + (begins + t) * HQ + head, sums, mask=real)
    mix = mix / tl.where(total > 0, total, 1.0)[:, None]
    place = out + ((begins + t) * HQ + head)[:, None] * DV + dv[None, :]
    tl.store(place, mix.to(out.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])
