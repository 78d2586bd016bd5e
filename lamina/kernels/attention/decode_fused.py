"""Decode attention for one new token per row: norm, RoPE, storing the token, and attention in one launch.

`rope_append` and `decode` are two launches, and with a short context most of the time is between them: a program reads
nothing while it waits for queries that were just rotated. Here a program rotates the queries of its key head itself.
The program of the last split of a row also rotates the new key, stores it with its value, and attends to both from
registers.

No launch of this pass writes committed tokens, so the first blocks of a split, one per pipeline stage, are loaded
before the launch in front has finished. Not in float32: there the queries alone fill the registers of the loop. The
rest is as in `decode.py`. The slot that the new token takes is one that no query of this pass sees.

One row with as many key heads as query heads and no RoPE (decoders with learned positions, which have short contexts,
and their cross-attention) has one query per program (`single_plan`): M is 1, and products are sums in registers.

Two kinds of layers store nothing here (`attend_stored`): one that reads the keys and values of another layer, which has
stored this pass's token already, and cross-attention over a source, where there is no new token.

The references are `lamina.cache.step.Step.ready` and `lamina.attention.reference_attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.bias import KernelForm
from lamina.attention.window import Window
from lamina.errors import InputError
from lamina.kernels.attention.decode import MOST_QUERIES, with_room
from lamina.kernels.attention.online_softmax import (
    LOWEST,
    accumulate,
    accumulate_one,
    merge_splits,
    store_output,
    to_scores,
)
from lamina.kernels.attention.rope_append import norm_and_rotate, norm_arguments
from lamina.kernels.attention.score_bias import add_bias, bias_arguments, slopes_of
from lamina.kernels.attention.split_kv import Division, assigned_split, shortest_split, target_splits
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.attention.visible import most_visible, position_of, slot_of, window_arguments
from lamina.kernels.eligibility import head_bytes, why_no_heads
from lamina.kernels.entry import K_STORE, V_STORE, store_pointer
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, limits_of
from lamina.kernels.slots import cell_of, cells_in, first_cell, pages_of, stages_for
from lamina.kernels.workspace import arrivals

if TYPE_CHECKING:
    from lamina.nn.norm import RMSNorm

# By bytes of one token's key and value in one head, each padded to a power of two.
SHAPES = {
    128: Tiling(128, 4, 4),
    256: Tiling(128, 4, 3),
    512: Tiling(128, 8, 3),
    1024: Tiling(32, 8, 3),
    2048: Tiling(16, 4, 3),
}
# Many rows: a smaller tile, so two programs fit per SM. One stage fewer would fit three, which unbalances the SMs.
CROWDED = {512: Tiling(64, 4, 4)}
# One query per program (`single_plan`): bytes of keys that a program of four warps holds in its registers, beside as
# many of values; and tokens that the programs must read at once.
SINGLE_BYTES, SINGLE_TOKENS = 1 << 15, 2048


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these queries, keys and values: one token per row, and heads that fit its registers."""
    return supports_heads(q, k.shape[1], v.shape[3])


def supports_heads(q: Tensor, Hk: int, Dv: int) -> bool:
    """The same for Hk key heads, with values of Dv."""
    (Hq, T, D), dtype = q.shape[1:], q.dtype
    if T > 1 or Hq // Hk > MOST_QUERIES[q.element_size()] or why_no_heads(D, Dv, dtype) is not None:
        return False
    limits = limits_of(q.device)
    return with_room(_shape(D, Dv, dtype, False), D, Dv, dtype, Hq // Hk, 0, limits.shared, limits) is not None


def _shape(key_dim: int, value_dim: int, dtype: torch.dtype, crowded: bool) -> Tiling:
    size = head_bytes(key_dim, value_dim, dtype.itemsize)
    most_bytes = min(most for most in SHAPES if size <= most)
    return CROWDED.get(most_bytes, SHAPES[most_bytes]) if crowded else SHAPES[most_bytes]


def plan_for(
    key_dim: int, value_dim: int, dtype: torch.dtype, queries: int, groups: int, limits: Limits, bias: str = ""
) -> tuple[Tiling, int, int]:
    """For `queries` queries of each of `groups` key heads of all rows: -> (the shape of the launch, programs per SM,
    tokens that a split has at least)."""
    plain, crowded = (_shape(key_dim, value_dim, dtype, some) for some in (False, True))
    own, programs = (crowded, 2) if 2 * groups > limits.multiprocessors and crowded != plain else (plain, 1)
    room = limits.room(programs if queries <= 32 else 1)  # with more queries, two programs fit on no device
    shape = with_room(own, key_dim, value_dim, dtype, queries, 0, room, limits, bias)
    if shape is None:
        raise InputError(
            f"{queries} queries of {key_dim} and {value_dim} values do not fit {limits.shared} bytes of shared memory; "
            "use decode_attention"
        )
    return shape, programs, shortest_split(own.block)


def single_plan(
    key_dim: int, value_dim: int, dtype: torch.dtype, heads: int, limits: Limits
) -> tuple[Tiling, int, int] | None:
    """The same for one query of each of `heads` key heads, of one row. None for wide heads, which fill the registers,
    and where all programs together read too few tokens.

    A program loads one block into registers before it waits, and has no use for tensor cores. That is faster up to
    a few thousand tokens, where a launch is mostly latency; a longer split is read one block after the other.
    """
    widest = max(16, triton.next_power_of_2(max(key_dim, value_dim)))
    block, programs = SINGLE_BYTES // (widest * dtype.itemsize), 2  # programs per SM
    at_once = block * (programs * limits.multiprocessors // heads)
    return None if widest > 64 or at_once < SINGLE_TOKENS else (Tiling(block, 4, 1), programs, block)


@triton.jit
def load_new(
    q, k, v, q_head,  # this key head's queries [G, D], new key [D] and value [DV]; stride of query heads
    q_weight, k_weight, q_eps, k_eps, q_plus, k_plus, cos, sin, factor,  # as for `_attend_token`, of this row
    k_store, v_store, own, takes_new, r, d, dv,  # of this row and head; cell of the new token, whether it is taken here
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr,
    NORMS: tl.constexpr, WEIGHTS: tl.constexpr, FACTOR: tl.constexpr, NEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Waits for the launch in front, then -> (queries [M, D_PAD] and new key [1, D_PAD] after norm and RoPE, new value
    [1, DV_PAD])."""
    begin(PDL)
    x = q + r[:, None] * q_head
    queries = norm_and_rotate(x, (r < G)[:, None], q_weight, q_eps, q_plus, cos, sin, d,
                              D, PAIRS, NEIGHBOURS, NORMS, WEIGHTS)  # fmt: skip
    if FACTOR:
        queries *= tl.load(factor)
    one = tl.arange(0, 1)[:, None]
    if NEW == "given":
        new_key = norm_and_rotate(k + one, (one == 0) & takes_new, k_weight, k_eps, k_plus, cos, sin, d,
                                  D, PAIRS, NEIGHBOURS, NORMS, WEIGHTS)  # fmt: skip
        new_value = tl.load(v + dv, mask=(dv < DV) & takes_new, other=0.0)[None, :]
    elif NEW == "stored":  # by an earlier launch of this pass, which may have been the one in front
        new_key = tl.load(k_store + own * D + d, mask=(d < D) & takes_new, other=0.0)[None, :]
        new_value = tl.load(v_store + own * DV + dv, mask=(dv < DV) & takes_new, other=0.0)[None, :]
    else:
        new_key, new_value = d[None, :] * 0.0, (dv[None, :] * 0.0).to(k.dtype.element_ty)
    return queries.to(k.dtype.element_ty), new_key.to(k.dtype.element_ty), new_value


@triton.jit(do_not_specialize=["rows", "wanted"])  # one kernel for many numbers of rows
def _attend_token(
    out, q, k, v,  # [B, 1, Hq, DV], [B, Hq, 1, D], [B, Hk, 1, D], [B, Hk, 1, DV]
    cos, sin, q_weight, k_weight, factor, gate, sinks,  # [B, 1, PAIRS] twice, [D] twice, [B, 1], [B, Hq, 1, DV], [Hq]
    bias, buckets, farthest,  # `score_bias.py`
    parts, counters, table,  # partial results and their counters (`merge_splits`); the entry's table row
    rows, wanted, size, keep, least,  # B; target number of splits; the window; shortest split
    scale, softcap,
    q_row, q_head, k_row, k_head, v_row, v_head, rope_row, factor_row, gate_row, gate_head,  # strides
    q_eps, k_eps, q_plus, k_plus,  # of the norms: `plus` is added to the weight
    G: tl.constexpr, HEADS: tl.constexpr,  # G = Hq // Hk, HEADS = Hk
    D: tl.constexpr, DV: tl.constexpr, PAIRS: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr,  # G, padded; M is 1 with one query per program
    KIND: tl.constexpr, NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr,
    FACTOR: tl.constexpr, GATE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr,
    NEW: tl.constexpr,  # the new key and value are "given", are "stored" in their slot already, or there are "none"
    B: tl.constexpr, MERGES: tl.constexpr, BLOCK: tl.constexpr, BUNCH: tl.constexpr, TREE: tl.constexpr,
    CHUNK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, item): the G queries of one key head over one split of one row."""
    head = tl.program_id(0)
    row, split, n_splits, base, split_tokens, length, count, kept, first, n_visible, ring = assigned_split(
        table, rows, wanted, size, keep, least, 1, B, KIND, BLOCK
    )
    if split >= n_splits:
        return
    origin, pages = first_cell(table, row * HEADS + head, PAGE), pages_of(table, row, PAGE)
    k_store = store_pointer(table, K_STORE, k.dtype) + origin * D
    v_store = store_pointer(table, V_STORE, k.dtype) + origin * DV
    begins = split * split_tokens
    ends = tl.minimum(begins + split_tokens, n_visible)
    d, dv, r = tl.arange(0, D_PAD), tl.arange(0, DV_PAD), tl.arange(0, M)
    takes_new = (split == n_splits - 1) & (count > 0)  # the last split of a row is the shortest
    if NEW == "none":
        takes_new = count < 0
    own = tl.where(length < keep, length, keep + (length - keep) % ring)  # the slot of the new token
    own = cell_of(pages, head, own, takes_new, HEADS, PAGE)
    h, real = (head * G + r)[:, None], (r < G)[:, None]
    slopes = slopes_of(bias, h, real, BIAS)
    cos += row * rope_row
    sin += row * rope_row
    q += row * q_row + head * G * q_head
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    if FACTOR:
        factor += row * factor_row
    queries = tl.zeros([M, D_PAD], k.dtype.element_ty)
    new_key, new_value = tl.zeros([1, D_PAD], k.dtype.element_ty), tl.zeros([1, DV_PAD], k.dtype.element_ty)
    LATE: tl.constexpr = k.dtype.element_ty != tl.float32  # queries in float32 would fill the registers of the loop
    if not LATE:
        queries, new_key, new_value = load_new(
            q, k, v, q_head, q_weight, k_weight, q_eps, k_eps, q_plus, k_plus, cos, sin, factor, k_store, v_store,
            own, takes_new, r, d, dv, G, D, DV, PAIRS, NEIGHBOURS, NORMS, WEIGHTS, FACTOR, NEW, PDL,
        )  # fmt: skip
    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    mix = tl.zeros([M, DV_PAD], tl.float32)
    for start in range(begins, tl.maximum(ends, begins + 1), BLOCK):
        j = start + tl.arange(0, BLOCK)
        slot = slot_of(j, kept, first, ring, keep, KIND)
        cell = cells_in(pages, head, slot, start, ends, HEADS, PAGE, KIND, BLOCK)
        there = (j < ends)[:, None]
        keys = tl.load(k_store + cell[:, None] * D + d[None, :], mask=there & (d < D)[None, :], other=0.0)
        values = tl.load(v_store + cell[:, None] * DV + dv[None, :], mask=there & (dv < DV)[None, :], other=0.0)
        if LATE and start == begins:  # the loads of the first blocks are issued before this waits
            queries, new_key, new_value = load_new(
                q, k, v, q_head, q_weight, k_weight, q_eps, k_eps, q_plus, k_plus, cos, sin, factor, k_store, v_store,
                own, takes_new, r, d, dv, G, D, DV, PAIRS, NEIGHBOURS, NORMS, WEIGHTS, FACTOR, NEW, PDL,
            )  # fmt: skip
        if M == 1:
            scores = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)  # [BLOCK]
            scores = to_scores(scores, scale, softcap, SOFTCAP)
            top, total, mix = accumulate_one(top, total, mix, scores, j < ends, values)
        else:
            scores = to_scores(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scale, softcap, SOFTCAP)
            if BIAS != "":
                distance = (length - position_of(j, kept, first))[None, :]
                scores = add_bias(scores, slopes, bias, buckets, farthest, h, real, distance, HEADS * G, BIAS)
            top, total, mix = accumulate(top, total, mix, scores, (j < ends)[None, :], values)

    if takes_new:
        score = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32), 1)
        score = to_scores(score, scale, softcap, SOFTCAP)
        if BIAS == "buckets":  # slopes are multiplied by a distance of 0
            here = tl.arange(0, 1)[None, :]
            score = tl.sum(add_bias(score[:, None], slopes, bias, buckets, farthest, h, real, here, HEADS * G, BIAS), 1)
        higher = tl.maximum(top, score)
        rescale, prob = tl.exp2(top - higher), tl.exp2(score - higher)
        total = total * rescale + prob
        mix = mix * rescale[:, None] + prob.to(v.dtype.element_ty).to(tl.float32)[:, None] * new_value.to(tl.float32)
        top = higher
        if NEW == "given":
            tl.store(k_store + own * D + d[None, :], new_key, mask=(d < D)[None, :])
            tl.store(v_store + own * DV + dv[None, :], new_value, mask=(dv < DV)[None, :])

    if n_splits == 1:
        store_output(out, top, total, mix, sinks, gate + row * gate_row, gate_head, row, head, r, dv, count,
                     1, G, HEADS, DV, SINKS, GATE)  # fmt: skip
    elif MERGES:
        n = tl.arange(0, R)
        whole, best, sums, mixed = merge_splits(
            parts, counters, top, total, mix, head, base, split, n_splits, r, n, dv,
            G, DV, R, DV_PAD, BUNCH, TREE, CHUNK, M == 1,
        )  # fmt: skip
        if whole:
            store_output(out, best, sums, mixed, sinks, gate + row * gate_row, gate_head, row, head, n, dv, count,
                         1, G, HEADS, DV, SINKS, GATE)  # fmt: skip


def attend_token(
    q: Tensor,  # [B, Hq, 1, D]
    k: Tensor,  # [B, Hk, 1, D]
    v: Tensor,  # [B, Hk, 1, Dv]
    rope: tuple[Tensor, Tensor] | None,  # this, and neighbours to factor, as `rotate_and_append` takes them
    table: Tensor,  # the row of the cache's table for this entry
    window: Window,
    *,
    neighbours: bool = False,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    norms_last: bool = False,
    factor: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    bias: KernelForm | None = None,
    gate: Tensor | None = None,  # [B, Hq, 1, Dv]: the output is multiplied by its sigmoid
    **tuning: Any,
) -> Tensor:
    """Stores the new token in its slot and attends from it over all that it sees -> [B, Hq, 1, Dv].

    The last axis of q, k, v and gate is contiguous. A row with count 0 is not changed and gives zeros. `tuning`: as
    `_launch` takes it.
    """
    before: dict[str, Any] = dict(rope=rope, neighbours=neighbours, norms=norms, norms_last=norms_last, factor=factor)
    how: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks, bias=bias, gate=gate)
    return _launch(q, (k, v), table, k.shape[1], v.shape[3], window, "given", **before, **how, **tuning)


def attend_stored(
    q: Tensor,  # [B, Hq, 1, D]
    table: Tensor,  # the row of the table for the entry that holds the keys and values
    kv_heads: int,
    value_dim: int,
    window: Window,
    *,
    new: bool,
    **how: Any,
) -> Tensor:
    """Attends from the new token over keys and values that other launches have stored -> [B, Hq, 1, Dv].

    new   True: those of the new token are in their slot already; False: there are none, as in cross-attention
    how   the options of `attend_token`; norms and rope are for q alone
    """
    return _launch(q, None, table, kv_heads, value_dim, window, "stored" if new else "none", **how)


def _launch(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    table: Tensor,
    Hk: int,
    Dv: int,
    window: Window,
    new_token: Literal["given", "stored", "none"],
    *,
    scale: float,
    rope: tuple[Tensor, Tensor] | None = None,
    neighbours: bool = False,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    norms_last: bool = False,
    factor: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: KernelForm | None = None,
    gate: Tensor | None = None,
    most_parts: int | None = None,
    shape: Tiling | None = None,
    least: int | None = None,
    page: int = 0,
) -> Tensor:
    """page: slots per page; 0 without pages. `most_parts` (target number of splits), `shape` and `least` are for
    measuring other configurations."""
    B, Hq, _, D = q.shape
    k, v = (q, q) if new is None else new
    strides = (0,) * 4 if new is None else (*k.stride()[:2], *v.stride()[:2])
    G = Hq // Hk
    limits = limits_of(q.device)
    biases, bias_kind = bias_arguments(bias)
    single = None
    if B == G == 1 and rope is None and bias is None and shape is None:
        single = single_plan(D, Dv, k.dtype, Hk, limits)
    own, waves, least_of_own = single or plan_for(D, Dv, k.dtype, G, B * Hk, limits, bias_kind)
    least = least or (least_of_own if shape is None else shortest_split(shape.block))
    shape = shape or own
    kind, span, keep = window_arguments(window)
    most = most_parts or target_splits(B, Hk, most_visible(window), least, limits.multiprocessors, waves=waves)
    out = torch.empty(B, 1, Hq, Dv, dtype=q.dtype, device=q.device)
    division = Division.of(B, Hk, G, Dv, most, out)
    R, values = triton.next_power_of_2(G), max(16, triton.next_power_of_2(Dv))
    cos, sin = (q, q) if rope is None else rope
    weights, scalars = norm_arguments(norms, q)
    launch(
        _attend_token, (Hk, division.items),
        out, q, k, v, cos, sin, *weights, *(q if one is None else one for one in (factor, gate, sinks)),
        *biases, division.parts, arrivals(q.device), table,
        B, division.wanted, span, keep, least, scale, 1.0 if softcap is None else softcap,
        *q.stride()[:2], *strides, cos.stride(0), 0 if factor is None else factor.stride(0),
        *((0, 0) if gate is None else gate.stride()[:2]), *scalars,
        G=G, HEADS=Hk, D=D, DV=Dv, PAIRS=0 if rope is None else cos.shape[-1],
        D_PAD=max(16, triton.next_power_of_2(D)), DV_PAD=values, M=1 if single else max(16, R), R=R,
        KIND=kind, NEIGHBOURS=neighbours,
        NORMS="" if norms is None else "last" if norms_last else "first",
        WEIGHTS=norms is not None and norms[0].weight is not None, FACTOR=factor is not None, GATE=gate is not None,
        SOFTCAP=softcap is not None, SINKS=sinks is not None, BIAS=bias_kind, NEW=new_token, BLOCK=shape.block,
        **division.constants(R, values, shape.warps), PAGE=page,
        num_warps=shape.warps, num_stages=stages_for(shape.stages, page), early=single is not None,
    )  # fmt: skip
    return out.transpose(1, 2)
