"""Decode attention in the latent space (MLA with absorbed projections): one vector per token is key and value of every
head.

A slot holds [latent | rotary key]. The key is all of it, the value its first `rank` values, so a block is loaded once
and used in three products: two for the scores, one for the mix. The committed latents are never expanded to heads.
Heads are few compared with tokens and rank, so products have tokens or the rank as rows, and all heads times new tokens
as columns: the matrix units then take a block from shared memory as it is. New tokens extend the list of the last
split.

A partial result is `rank` values per query, too many for one program to merge. So splits are not merged here: each is
stored as a mean of latents and its `level` (log2 of the sum of its exponentials), and `mla_project.out_of_latent`
merges them. The rest is as in `decode.py`.

Where an indexer selects tokens (`indexer.py`), each new token has its own list of positions, and its heads are the
queries of one or a few programs; nothing else of the row is read.

Quantized latents are dequantized as they are loaded. Those of new tokens are in their slots by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.window import Full, Window
from lamina.cache.codec.registry import FormatName
from lamina.errors import InputError
from lamina.kernels.attention.decode import MOST_QUERIES
from lamina.kernels.attention.online_softmax import LOG2E, LOWEST
from lamina.kernels.attention.rope_append import slot_at
from lamina.kernels.attention.split_kv import divide, prefetch, prefetch_tokens
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.attention.visible import (
    MOST_NEW,
    first_seen,
    most_visible,
    position_of,
    slot_of,
    visible,
    window_arguments,
)
from lamina.kernels.entry import K_HIGH, K_SCALES, STORE, row_of, store_pointer
from lamina.kernels.gemm.epilogue import plus
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import KIB, Limits, fitted, limits_of, smaller
from lamina.kernels.quant.dequantize import dequantize, materialize
from lamina.kernels.quant.field import Coded
from lamina.kernels.quant.layout import code_bytes, high_bytes, scale_values
from lamina.kernels.slots import cells_in, first_cell, pages_of, stages_for

# By bytes per value and queries per program. Blocks of 64 tokens suit the matrix units of Hopper.
SHAPES = {
    (2, 16): Tiling(64, 4, 2),
    (2, 32): Tiling(64, 4, 2),
    (2, 64): Tiling(64, 8, 2),
    (4, 16): Tiling(16, 8, 2),
}
OTHERS = Tiling(32, 8, 2)  # other devices; on sm_100, larger blocks would be kept twice in shared memory
CODED = {
    16: Tiling(32, 4, 2),
    32: Tiling(32, 8, 2),
    64: Tiling(32, 8, 2),
}  # dequantized values take registers
LEAST = 64  # tokens per split, at least: a slot is as long as the keys and values of four heads
LEAST_OF_MANY = 4096  # the same where the programs fill the device undivided
MOST_SPLITS = 128
STRETCH = 128  # values of a float32 latent per partial sum, where shared memory has room for that


@dataclass(frozen=True)
class LatentSplits:
    """Partial results of attention over latents, one per split. Query h·T + t of a row is in block (h·T + t) // M."""

    means: Tensor  # [B · blocks, splits, queries, rank]
    levels: Tensor  # [B · blocks, queries, splits] float32: log2 of the sum of a split's exponentials
    rows: int  # B
    heads: int
    tokens: int  # T
    queries: int  # M, per block
    window: Window
    least: int
    block: int
    top: int = 0  # tokens that an indexer selected for a query, at most; then blocks are per token, of its heads

    @property
    def blocks(self) -> int:
        """Blocks of queries per row; per token where an indexer selects."""
        return len(self.means) // (self.rows * self.tokens if self.top else self.rows)


@triton.jit
def selected_tokens(length, count, t, TOP: tl.constexpr):
    """How many tokens new token t of a row attends to, of those that it sees; 0 for padding."""
    return tl.where(t < count, tl.minimum(length + t + 1, TOP), 0)


@triton.jit
def _attend_latent(
    means, levels, q,  # [B · QUERIES, splits, ROWS, RANK], [B · QUERIES, ROWS, splits], [B, H, T, RANK + ROPE]
    new, scales, high,  # this pass's tokens [B, T, RANK + ROPE], or its parts where latents are quantized
    chosen,  # int32 [B, T, TOP], with TOP: the positions that each token attends to
    table, size, keep, least, scale,  # the entry's table row; the window; shortest split
    q_row, q_head, q_token, new_row, new_token,  # strides
    T: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,  # queries per program: padded, stored; blocks per row
    KIND: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr, STRETCH: tl.constexpr,  # tokens to prefetch; values of a float32 latent per partial sum
    TOP: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row · QUERIES + block, split): M queries of one row, over all heads, on one split of its tokens.

    With TOP, program ((row · T + t) · QUERIES + block, split): M heads of one token, on one split of its selected ones.
    """
    WIDTH: tl.constexpr = code_bytes(RANK + ROPE, FORM)  # values per slot, or bytes of codes
    ORDER: tl.constexpr = "selected" if TOP else KIND
    group, split, most = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, block = group // QUERIES, group % QUERIES
    if TOP:
        chosen += row * TOP
        token = row % T
        row = row // T
    length, count = row_of(table, row, T)
    kept, first, n_visible, ring = visible(table, length, count, size, keep, KIND)
    if TOP:
        n_visible = selected_tokens(length, count, token, TOP)  # new ones among them
        count = 0
    split_tokens, n_splits = divide(n_visible, most, least, BLOCK)
    if split >= n_splits:
        return
    store = store_pointer(table, STORE, new.dtype)
    origin, pages = first_cell(table, row, PAGE), pages_of(table, row, PAGE)
    store += origin * WIDTH
    if FORM != "plain":
        scales = tl.multiple_of(tl.load(table + K_SCALES), 4).to(scales.dtype)
        scales += origin * scale_values(RANK + ROPE, FORM)
        high = tl.load(table + K_HIGH).to(high.dtype) + origin * high_bytes(RANK + ROPE, FORM)
    begins = split * split_tokens
    ends = tl.minimum(begins + split_tokens, n_visible)
    if AHEAD:
        prefetch(store, begins, tl.minimum(begins + AHEAD, ends), WIDTH)
    begin(PDL)

    c, p = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, ROPE_PAD)[None, :]
    m = tl.arange(0, M)  # this program's queries: r = h · T + t is token t of head h
    r = block * M + m
    t, h, real = r % T, r // T, (r < H * T)[:, None]
    if TOP:
        t, h, real = token, r, (r < H)[:, None]
    low = first_seen(length + r % T, size, KIND)[None, :]  # [1, M]
    ours = q + (row * q_row + h * q_head + t * q_token)[:, None]
    q_latent = tl.trans(tl.load(ours + c, mask=real & (c < RANK), other=0.0))  # [RANK, M]
    q_rope = tl.trans(tl.load(ours + RANK + p, mask=real & (p < ROPE), other=0.0))  # [ROPE, M]
    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    mix = tl.zeros([RANK_PAD, M], tl.float32)

    # The slot of the first new token. Several new tokens have slots before they are accepted only in a line.
    last = length
    if FORM != "plain" and T == 1:
        last = slot_at(table, length).to(tl.int32)
    stop = tl.where(split == n_splits - 1, n_visible + count, ends)  # the last split, the shortest, has the new tokens
    for start in range(begins, stop, BLOCK):
        if AHEAD:
            prefetch(store, start + AHEAD, tl.minimum(start + AHEAD + BLOCK, ends), WIDTH)
        j = start + tl.arange(0, BLOCK)
        u = j - n_visible  # index of a new token; negative for committed ones
        slot = slot_of(j, kept, first, ring, keep, KIND)  # in a line new tokens are in their slots too
        if TOP:
            slot = tl.load(chosen + j, mask=j < stop, other=0)
        seen = (j < stop)[:, None]
        if FORM == "plain":
            cell = cells_in(pages, 0, slot, start, stop if KIND == "full" else ends, 1, PAGE, ORDER, BLOCK)
            at = store + cell * WIDTH
            if KIND != "full":
                at = tl.where(u < 0, at, new + row * new_row + u * new_token)
            at = at[:, None]
            latents = tl.load(at + c, mask=seen & (c < RANK), other=0.0)  # [BLOCK, RANK]
            ropes = tl.load(at + RANK + p, mask=seen & (p < ROPE), other=0.0)  # [BLOCK, ROPE]
        else:
            if KIND != "full":
                slot = tl.where(u < 0, slot, last + u)
            cell = cells_in(pages, 0, slot, start, stop, 1, PAGE, ORDER, BLOCK)[:, None]
            at, by = store + cell * WIDTH, scales + cell * scale_values(RANK + ROPE, FORM)
            above = high + cell * high_bytes(RANK + ROPE, FORM)
            latents = dequantize(at, by, above, seen, 0, RANK, RANK_PAD, RANK + ROPE, FORM)
            latents = materialize(latents.to(q.dtype.element_ty))
            ropes = dequantize(at, by, above, seen, RANK, ROPE, ROPE_PAD, RANK + ROPE, FORM).to(q.dtype.element_ty)
        if latents.dtype == tl.float32:  # one sum over the whole rank would round too often: compensated partial sums
            scores, lost = tl.zeros([BLOCK, M], tl.float32), tl.zeros([BLOCK, M], tl.float32)
            for i in tl.static_range(triton.cdiv(RANK_PAD, STRETCH)):
                q_part = tl.where(tl.trans(c) // STRETCH == i, q_latent, 0.0)
                scores, lost = plus(scores, lost, tl.dot(latents, q_part, input_precision="ieee"))
            scores, lost = plus(scores, lost, tl.dot(ropes, q_rope, input_precision="ieee"))
        else:
            scores = tl.dot(ropes, q_rope, tl.dot(latents, q_latent))
        scores *= scale * LOG2E  # [BLOCK, M]
        if T > 1 and TOP == 0:
            seen = seen & (u[:, None] <= t[None, :])
            if KIND != "full":
                position = tl.where(u < 0, position_of(j, kept, first), length + u)[:, None]
                seen = seen & ((position >= low) | (position < keep))
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=0))
        probs, rescale = tl.exp2(scores - higher[None, :]), tl.exp2(top - higher)
        total = total * rescale + tl.sum(probs, axis=0)
        mix = tl.dot(tl.trans(latents), probs.to(latents.dtype), mix * rescale[None, :], input_precision="ieee")
        top = higher

    some = total > 0
    mean = mix / tl.where(some, total, 1.0)[None, :]
    level = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), LOWEST)
    place = (group.to(tl.int64) * most + split) * ROWS + m
    column = tl.arange(0, RANK_PAD)[:, None]
    inside = (m < ROWS)[None, :] & (column < RANK)
    tl.store(means + place[None, :] * RANK + column, mean.to(means.dtype.element_ty), mask=inside)
    tl.store(levels + (group * ROWS + m) * most + split, level, mask=m < ROWS)


def decode_latent(
    q: Tensor,  # [B, H, T, rank + rope]: projected down to the latent space
    new: Tensor | Coded,  # [B, T, rank + rope]: this pass's own tokens; in their slots too, except plain ones of a ring
    table: Tensor,  # the row of the cache's table for this entry
    *,
    rank: int,
    scale: float,
    window: Window | None = None,
    most_splits: int | None = None,
    shape: Tiling | None = None,
    least: int | None = None,
    ahead: bool = True,
    chosen: Tensor | None = None,  # int32 [B, T, top]: positions to attend to, from `indexer.select_tokens`
    page: int = 0,  # slots per page; 0 without pages
) -> LatentSplits:
    """Attention of up to 16 new tokens per row over the row's latents and their own, as partial results per split.

    As `decode_attention` with one key head and values = keys[..., :rank]. `most_splits`, `shape`, `least` and `ahead`
    (prefetch) are for measuring other configurations.
    """
    B, H, T, D = q.shape
    if not 1 <= T <= MOST_NEW.value:
        raise InputError(
            f"{T} new tokens a row: decode attention takes 1 to {MOST_NEW.value}, use lamina.attention for more"
        )
    limits = limits_of(q.device)
    if chosen is not None and not isinstance(window or Full(), Full):
        raise InputError(
            f"the kernels of latent attention take a selection of tokens with the window Full, not {window}"
        )
    top, groups = (0, B) if chosen is None else (chosen.shape[-1], B * T)
    each = H * T if chosen is None else H  # queries of a group, which attend to the same tokens
    plan = plan_for(q.element_size(), each, rank, D - rank, isinstance(new, Coded), limits)
    M, shape = plan.queries, shape or plan.shape
    blocks = triton.cdiv(each, M)
    queries = M if blocks > 1 else each
    window = window or Full()
    kind, size, keep = window_arguments(window)
    least = least or (LEAST if groups * blocks < limits.multiprocessors else LEAST_OF_MANY)
    if most_splits is None:
        most_splits = splits_for(groups * blocks, top or most_visible(window), least, limits.multiprocessors)
    form: FormatName = "plain"
    if isinstance(new, Coded):
        form, store, scales, high = new.keys.form, new.k.codes, new.k.scales, new.k.high
    else:
        store = scales = high = new
    token_bytes = code_bytes(D, form) * store.element_size()
    means = torch.empty(groups * blocks, most_splits, queries, rank, dtype=q.dtype, device=q.device)
    levels = torch.empty(groups * blocks, queries, most_splits, device=q.device)
    launch(
        _attend_latent, (groups * blocks, most_splits),
        means, levels, q, store, scales, high, table if chosen is None else chosen, table,
        size, keep, least, scale, *q.stride()[:3], *store.stride()[:2],
        T=T, H=H, RANK=rank, ROPE=D - rank,
        RANK_PAD=max(16, triton.next_power_of_2(rank)), ROPE_PAD=max(16, triton.next_power_of_2(D - rank)),
        M=M, ROWS=queries, QUERIES=blocks, KIND=kind, FORM=form, BLOCK=shape.block,
        AHEAD=prefetch_tokens(kind, token_bytes, shape.block, limits) if ahead and not page and not top else 0,
        STRETCH=plan.stretch, TOP=top, PAGE=page, num_warps=shape.warps, num_stages=stages_for(shape.stages, page),
    )  # fmt: skip
    return LatentSplits(means, levels, B, H, T, M, window, least, shape.block, top)


def splits_for(groups: int, slots: int | None, least: int, multiprocessors: int) -> int:
    """How many splits a group of queries may have: one program per SM; with many groups still a few, for a row that is
    much longer than the others.

    slots   the most tokens that a row can see, None if not known
    """
    room = min(max(multiprocessors // groups, 4), MOST_SPLITS)
    return room if slots is None else max(1, min(room, triton.cdiv(slots, least)))


@dataclass(frozen=True)
class SplitPlan:
    """Queries per program, the launch shape, and values of a float32 latent per partial sum."""

    queries: int
    shape: Tiling
    stretch: int


@cache
def plan_for(itemsize: int, queries: int, rank: int, rope: int, coded: bool, limits: Limits) -> SplitPlan:
    """For `queries` queries of a row. Where shared memory is short, a program first has fewer queries, then blocks of
    fewer than 32 tokens; float32 sums in one piece come last."""
    most = min(max(16, triton.next_power_of_2(queries)), MOST_QUERIES[itemsize])
    rank, rope = max(16, triton.next_power_of_2(rank)), max(16, triton.next_power_of_2(rope))
    plans = (
        SplitPlan(M, shape, stretch)
        for stretch in dict.fromkeys((min(STRETCH, rank), rank))
        for M in (most >> i for i in range(3))
        if M >= 16
        for shape in smaller(shape_for(itemsize, M, coded, limits), least=16 if M == 16 else 32)
    )
    return fitted(plans, lambda one: shared_bytes(one, rank, rope, itemsize, coded, limits), limits.shared)


def shape_for(itemsize: int, queries: int, coded: bool, limits: Limits) -> Tiling:
    """The shape for `queries` queries per program where shared memory has room for it."""
    if coded and itemsize == 2:
        return CODED[queries]
    return SHAPES[itemsize, queries] if limits.capability[0] == 9 or itemsize == 4 else OTHERS


def shared_bytes(plan: SplitPlan, rank: int, rope: int, itemsize: int, coded: bool, limits: Limits) -> int:
    """An upper bound of a program's shared memory: blocks of latents with their keys, queries, and probabilities for
    the product with latents. In float32 every stretch has its own queries, zero elsewhere. Codes are kept
    beside the values they become, and on sm_100 those values twice."""
    (block, stages), width = (plan.shape.block, plan.shape.stages), rank + rope
    blocks = block * width * itemsize * limits.buffers(stages, block)
    times = rank // plan.stretch if itemsize == 4 else 1
    own = plan.queries * (rank * times + rope + block) * itemsize
    codes = block * (width + width // 8) * max(stages - 1, 1) if coded else 0
    codes += block * width * itemsize if coded and limits.capability[0] == 10 else 0
    return blocks + own + codes + 2 * KIB
