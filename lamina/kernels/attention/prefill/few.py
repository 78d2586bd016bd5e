"""Attention of a few queries over many keys: split-KV over any View, without a query × key mask.

As in `many.py` keys are in any order, with their positions. Queries are too few to fill the device, so the keys are
split: a program computes all queries of the heads that share a key head over one split, and a second launch merges the
splits (`online_softmax.py`). So every key is read once. There is no list of blocks: making one would take longer.

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
from lamina.attention.mask_bits import MaskBits
from lamina.attention.view import View
from lamina.kernels.attention.online_softmax import LOG2E, LOWEST, TAIL, accumulate, merge, store_split
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
from lamina.kernels.attention.prefill.many import Tile, needed_bytes
from lamina.kernels.attention.score_bias import add_bias, bias_arguments, slopes_of
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, fitted, limits_of, smaller

MOST_QUERIES = 64  # of all heads that share a key head, in one program
LEAST_KEYS = 256  # of a split
MERGED = 8  # queries of a program that merges
CHUNK = 4  # splits whose loads are issued together


def attend_few(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: View,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: KernelForm | None = None,
    mask: MaskBits | None = None,
) -> Tensor:
    """q [B, Hq, T, D], k [B, Hk, S, D], v [B, Hk, S, Dv] -> [B, Hq, T, Dv], a view of a tensor [B, T, Hq, Dv]

    view   without rules from outside and without a selection (`View.positional`), or with its mask as bits
    mask   what the queries see, for blocks of `few_tile(…).block` keys
    """
    (B, Hq, T, D), (Hk, S, Dv) = q.shape, (*k.shape[1:3], v.shape[-1])
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    limits, G = limits_of(q.device), Hq // Hk
    biases, bias_kind = bias_arguments(bias)
    tile = few_tile(G * T, D, Dv, q.element_size(), limits, bias_kind)
    blocks = triton.cdiv(G * T, tile.queries)
    groups = B * Hk * blocks
    splits = max(1, min(triton.cdiv(S, LEAST_KEYS), 2 * limits.multiprocessors // groups))
    kind, size, keep = kind_of(view.window) if mask is None else ("", 1, 0)
    spans, segments = (view.q_spans, view.kv_spans), (view.q_segments, view.kv_segments)
    if mask is not None:
        spans = segments = None, None
    bits, bits_at = mask_arguments(mask)
    first, rest = head_parts(D)
    parts = torch.empty(groups, splits, tile.queries, Dv + TAIL.value, device=q.device)
    padded = max(16, triton.next_power_of_2(Dv))
    launch(
        _attend_few, (splits, groups),
        parts, q, k, v, view.q_positions, view.kv_positions, *spans, *segments, bits, *biases,
        T, S, blocks, size, keep, scale * (1 if softcap is not None else LOG2E.value),
        1.0 if softcap is None else softcap,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], view.q_positions.stride(0), view.kv_positions.stride(0),
        *bits_at,
        HK=Hk, G=G, D=D, DV=Dv, FIRST=first, REST=rest, DV_PAD=padded, M=tile.queries, N=tile.block, KIND=kind,
        CAUSAL=view.causal, SPANS=spans[0] is not None, SEGMENTS=segments[0] is not None, SOFTCAP=softcap is not None,
        BIAS=bias_kind, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    out = q.new_empty(B, T, Hq, Dv)
    launch(
        _merge_few, (triton.cdiv(tile.queries, MERGED), groups),
        out, parts, sinks, T, blocks, splits,
        HK=Hk, G=G, DV=Dv, DV_PAD=padded, M=tile.queries, R=MERGED, SINKS=sinks is not None, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)


@cache
def few_tile(queries: int, key_dim: int, value_dim: int, itemsize: int, limits: Limits, bias_kind: str = "") -> Tile:
    """The tile for this many queries of all heads that share a key head. bias_kind: see `score_bias.py`"""
    rows = min(max(16, triton.next_power_of_2(queries)), MOST_QUERIES)
    warps = 8 if rows * triton.next_power_of_2(value_dim) >= 1 << 14 else 4
    best = Tile(rows, 64, warps, 3) if itemsize == 2 else Tile(rows, 32, warps, 2)
    narrower = [one for n in (rows, max(rows // 2, 16)) for one in smaller(replace(best, queries=n))]
    return fitted(narrower, lambda one: needed_bytes(one, key_dim, value_dim, itemsize, bias_kind), limits.shared)


@triton.jit
def queries_of(r, head, T, G: tl.constexpr):
    """Queries r = g · T + t of a key head: -> (token t, query head, which of them exist)"""
    return r % T, head * G + r // T, r < G * T


@triton.jit(do_not_specialize=["T", "blocks"])  # one kernel for many numbers of tokens
def _attend_few(
    parts, q, k, v,  # [groups, splits, M, DV + TAIL] float32, [B, HK · G, T, D], [B, HK, S, D], [B, HK, S, DV]
    q_positions, kv_positions, q_spans, kv_spans, q_segments, kv_segments,  # [B, T], [B, S] …
    bits, bias, buckets, farthest,  # see `MaskBits`, or None: positions decide; see score_bias.py
    T, S, blocks, size, keep, scale, softcap,  # window; scale in powers of two unless SOFTCAP
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, q_at_row, kv_at_row,  # strides
    bits_row, bits_token,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    FIRST: tl.constexpr, REST: tl.constexpr, DV_PAD: tl.constexpr,  # `head_parts`
    M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr,
    SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (split, (row · HK + head) · blocks + block): M queries of the heads that share a key head, over a split
    of the row's keys."""
    begin(PDL)
    split, group = tl.program_id(0), tl.program_id(1)
    head, row = group // blocks % HK, (group // blocks // HK).to(tl.int64)
    t, h, real = queries_of(group % blocks * M + tl.arange(0, M), head, T, G)
    n, d, e, dv = tl.arange(0, N), tl.arange(0, FIRST), FIRST + tl.arange(0, REST if REST else 16), tl.arange(0, DV_PAD)
    mine = q + row * q_row + (h.to(tl.int64) * q_head + t * q_token)[:, None]
    a = tl.load(mine + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    b = a
    if REST:
        b = tl.load(mine + e[None, :], mask=real[:, None] & (e < D)[None, :], other=0.0)
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    at = tl.load(q_positions + row * q_at_row + t, mask=real, other=0).to(tl.int32)
    span, segment = at, at
    if SPANS:
        span = tl.load(q_spans + row * T + t, mask=real, other=-1).to(tl.int32)
    if SEGMENTS:
        segment = tl.load(q_segments + row * T + t, mask=real, other=-1).to(tl.int32)
    slopes = slopes_of(bias, h, real, BIAS)

    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    mix = tl.zeros([M, DV_PAD], tl.float32)
    keys = tl.cdiv(tl.cdiv(S, tl.num_programs(0)), N) * N
    for start in range(split * keys, tl.minimum(split * keys + keys, S), N):
        s = start + n
        there = tl.load(kv_positions + row * kv_at_row + s, mask=s < S, other=-1).to(tl.int32)
        held = there >= 0
        x, y = load_keys(k, None, s.to(tl.int64)[None, :], k_token, 0, d, e, held[None, :], D, FIRST, REST)
        values = load_values(v + s.to(tl.int64)[:, None] * v_token, dv, held[:, None], DV, DV_PAD)
        scores = scores_in_powers(a, b, x, y, scale, softcap, REST, SOFTCAP)
        if BIAS != "":
            away = at[:, None] - there[None, :]
            scores = add_bias(
                scores, slopes[:, None], bias, buckets, farthest, h[:, None], real[:, None], away, HK * G, BIAS
            )
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
        top, total, mix = accumulate(top, total, mix, scores, shown & held[None, :], values)
    place = (group * tl.num_programs(0) + split).to(tl.int64)
    store_split(parts, top, total, mix, place, tl.arange(0, M), dv, M, DV)


@triton.jit(do_not_specialize=["T", "blocks", "splits"])
def _merge_few(
    out, parts, sinks,  # [B, T, HK · G, DV], [groups, splits, M, DV + TAIL], [HK · G]
    T, blocks, splits, HK: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, SINKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, group): queries i · R … + R of a group's block, over all splits."""
    group, inner = tl.program_id(1), tl.program_id(0) * R + tl.arange(0, R)
    head, row = group // blocks % HK, (group // blocks // HK).to(tl.int64)
    t, h, real = queries_of(group % blocks * M + inner, head, T, G)
    real, dv = real & (inner < M), tl.arange(0, DV_PAD)
    begin(PDL)
    top, total, mix = merge(parts, group.to(tl.int64) * splits, splits, inner, dv, M, DV, R, DV_PAD, CHUNK)
    if SINKS:  # one more key, with this score and no value
        sink = tl.load(sinks + h, mask=real, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        rescale = tl.exp2(top - higher)
        total, mix = total * rescale + tl.exp2(sink - higher), mix * rescale[:, None]
    mean = mix / tl.where(total > 0, total, 1.0)[:, None]
    place = out + ((row * T + t) * HK * G + h)[:, None] * DV + dv[None, :]
    tl.store(place, mean.to(out.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])
