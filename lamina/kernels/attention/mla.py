"""Decode attention in the latent (MLA, absorbed): one vector a token serves as key and value of every head.

A slot holds [latent | rotary key]. The key is all of it, the value its first `rank` numbers, so a block is read once
and used in three products: two for the scores, one for the mix. The history is never expanded. Heads are few against
tokens and ranks, so products have tokens or the rank as their rows and all heads times new tokens as their columns:
matrix units then take a block from shared memory as it lies. New tokens are one stretch with the last part's tokens.

A part is `rank` numbers for each query, too many for one program to merge: parts stay as they are, each a mean of
latents and the `level` it stands at, and `absorb.out_of_latent` merges them on the way. The rest is as in `attend`.

Latents in codes are made numbers as they come in, those of new tokens too, which are in their slots by then.
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
from lamina.kernels.attention.rope_append import slot_at
from lamina.kernels.attention.shape import Shape
from lamina.kernels.attention.split_kv import (
    LOG2E,
    NEW,
    NOTHING,
    cut,
    fetch,
    first_seen,
    position_of,
    reach,
    rule_of,
    slot_of,
    tokens_ahead,
    visible,
)
from lamina.kernels.entry import K_HIGH, K_SCALES, STORE, row_of, store_pointer
from lamina.kernels.gemm.epilogue import plus
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import KIB, Limits, fitted, limits_of, smaller
from lamina.kernels.quant.encode import Coded
from lamina.kernels.quant.layout import code_bytes, decoded, high_bytes, made_once, scale_numbers
from lamina.kernels.slots import cells_in, first_cell, pages_of, stages_for

# By bytes of one number, and by queries in a program. Blocks of 64 tokens are for the matrix units of Hopper.
SHAPES = {
    (2, 16): Shape(64, 4, 2),
    (2, 32): Shape(64, 4, 2),
    (2, 64): Shape(64, 8, 2),
    (4, 16): Shape(16, 8, 2),
}
OTHERS = Shape(32, 8, 2)  # for other devices; those of sm_100 would keep a second copy of larger blocks
CODED = {16: Shape(32, 4, 2), 32: Shape(32, 8, 2), 64: Shape(32, 8, 2)}  # numbers made of codes take registers
LEAST = 64  # tokens a part has at least: a slot is as long as the keys and values of four heads
LEAST_OF_MANY = 4096  # once the programs fill the device undivided
MOST_SPLITS = 128
STRETCH = 128  # of a latent in float32 that is summed up apart from the rest, where shared memory has room for that


@dataclass(frozen=True)
class Parts:
    """What the queries saw, in parts. Query h·T + t of a row lies in block (h·T + t) // M of its queries."""

    means: Tensor  # [B * blocks, parts, queries, rank]
    levels: Tensor  # [B * blocks, queries, parts] float32: log2 of the sum of a part's shares
    rows: int  # B
    heads: int
    tokens: int  # T
    queries: int  # M, in a block
    window: Window
    least: int
    block: int


@triton.jit
def _attend_latent(
    means, levels, q, new, scales, high, table, size, keep, least, scale, q_row, q_head, q_token, new_row, new_token,
    T: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    KIND: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, STRETCH: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = code_bytes(RANK + ROPE, FORM)  # numbers, or bytes of codes
    group, split, most = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, block = group // QUERIES, group % QUERIES
    length, count = row_of(table, row, T)
    kept, first, many, ring = visible(table, length, count, size, keep, KIND)
    each, used = cut(many, most, least, BLOCK)
    if split >= used:
        return
    store = store_pointer(table, STORE, new.dtype)
    slots, pages = first_cell(table, row, PAGE), pages_of(table, row, PAGE)
    store += slots * WIDTH
    if FORM != "plain":
        scales = tl.multiple_of(tl.load(table + K_SCALES), 4).to(scales.dtype)
        scales += slots * scale_numbers(RANK + ROPE, FORM)
        high = tl.load(table + K_HIGH).to(high.dtype) + slots * high_bytes(RANK + ROPE, FORM)
    begins = split * each
    ends = tl.minimum(begins + each, many)
    if AHEAD:
        fetch(store, begins, tl.minimum(begins + AHEAD, ends), WIDTH)
    begin(PDL)

    c, p = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, ROPE_PAD)[None, :]
    m = tl.arange(0, M)  # this program's queries: token t of head r // T
    r = block * M + m
    t = r % T
    low = first_seen(length + t, size, KIND)[None, :]  # [1, M]
    ours = q + (row * q_row + r // T * q_head + t * q_token)[:, None]
    real = (r < H * T)[:, None]
    q_latent = tl.trans(tl.load(ours + c, mask=real & (c < RANK), other=0.0))  # [RANK, M]
    q_rope = tl.trans(tl.load(ours + RANK + p, mask=real & (p < ROPE), other=0.0))
    top, total = tl.full([M], NOTHING, tl.float32), tl.zeros([M], tl.float32)
    mix = tl.zeros([RANK_PAD, M], tl.float32)

    last = length  # the slot of the first new token; of several, only a line has slots before they are accepted
    if FORM != "plain" and T == 1:
        last = slot_at(table, length).to(tl.int32)
    stop = tl.where(split == used - 1, many + count, ends)  # the shortest part takes the new tokens too
    for start in range(begins, stop, BLOCK):
        if AHEAD:
            fetch(store, start + AHEAD, tl.minimum(start + AHEAD + BLOCK, ends), WIDTH)
        j = start + tl.arange(0, BLOCK)
        u = j - many  # a new token's number
        slot = slot_of(j, kept, first, ring, keep, KIND)  # in a line new tokens are in theirs, too
        seen = (j < stop)[:, None]
        if FORM == "plain":
            slot = cells_in(pages, 0, slot, start, stop if KIND == "full" else ends, 1, PAGE, KIND, BLOCK)
            at = store + slot * WIDTH
            if KIND != "full":
                at = tl.where(u < 0, at, new + row * new_row + u * new_token)
            at = at[:, None]
            latents = tl.load(at + c, mask=seen & (c < RANK), other=0.0)  # [BLOCK, RANK]
            ropes = tl.load(at + RANK + p, mask=seen & (p < ROPE), other=0.0)
        else:
            if KIND != "full":
                slot = tl.where(u < 0, slot, last + u)
            slot = cells_in(pages, 0, slot, start, stop, 1, PAGE, KIND, BLOCK)[:, None]
            at, by = store + slot * WIDTH, scales + slot * scale_numbers(RANK + ROPE, FORM)
            above = high + slot * high_bytes(RANK + ROPE, FORM)
            latents = decoded(at, by, above, seen, 0, RANK, RANK_PAD, RANK + ROPE, FORM)
            latents = made_once(latents.to(q.dtype.element_ty))
            ropes = decoded(at, by, above, seen, RANK, ROPE, ROPE_PAD, RANK + ROPE, FORM).to(q.dtype.element_ty)
        if latents.dtype == tl.float32:  # sums of so many numbers would be rounded too often
            scores, lost = tl.zeros([BLOCK, M], tl.float32), tl.zeros([BLOCK, M], tl.float32)
            for i in tl.static_range(triton.cdiv(RANK_PAD, STRETCH)):
                q_part = tl.where(tl.trans(c) // STRETCH == i, q_latent, 0.0)
                scores, lost = plus(scores, lost, tl.dot(latents, q_part, input_precision="ieee"))
            scores, lost = plus(scores, lost, tl.dot(ropes, q_rope, input_precision="ieee"))
        else:
            scores = tl.dot(ropes, q_rope, tl.dot(latents, q_latent))
        scores *= scale * LOG2E  # [BLOCK, M]
        if T > 1:
            seen = seen & (u[:, None] <= t[None, :])
            if KIND != "full":
                position = tl.where(u < 0, position_of(j, kept, first), length + u)[:, None]
                seen = seen & ((position >= low) | (position < keep))
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=0))
        shares, fade = tl.exp2(scores - higher[None, :]), tl.exp2(top - higher)
        total = total * fade + tl.sum(shares, axis=0)
        mix = tl.dot(tl.trans(latents), shares.to(latents.dtype), mix * fade[None, :], input_precision="ieee")
        top = higher

    some = total > 0
    mean = mix / tl.where(some, total, 1.0)[None, :]
    level = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), NOTHING)
    place = (group.to(tl.int64) * most + split) * ROWS + m
    column = tl.arange(0, RANK_PAD)[:, None]
    inside = (m < ROWS)[None, :] & (column < RANK)
    tl.store(means + place[None, :] * RANK + column, mean.to(means.dtype.element_ty), mask=inside)
    tl.store(levels + (group * ROWS + m) * most + split, level, mask=m < ROWS)


def decode_latent(
    q: Tensor,  # [B, H, T, rank + rope]: the way up already folded in
    new: Tensor | Coded,  # [B, T, rank + rope]: this pass's own tokens; in their slots too, but plain ones of a ring
    table: Tensor,  # the row of the cache's table for this entry
    *,
    rank: int,
    scale: float,
    window: Window | None = None,
    most_splits: int | None = None,
    shape: Shape | None = None,
    least: int | None = None,
    ahead: bool = True,
    page: int = 0,  # slots of a page, where the store is in pages
) -> Parts:
    """Attention of up to 16 new tokens over the latents that the cache's rows hold and their own, in parts.

    As `decode_attention` with one key head and values = keys[..., :rank].
    """
    B, H, T, D = q.shape
    if not 1 <= T <= NEW.value:
        raise InputError(
            f"{T} new tokens a row: decode attention takes 1 to {NEW.value}, use lamina.attention for more"
        )
    limits = limits_of(q.device)
    plan = plan_for(q.element_size(), H * T, rank, D - rank, isinstance(new, Coded), limits)
    M, shape = plan.queries, shape or plan.shape
    blocks = triton.cdiv(H * T, M)
    queries = M if blocks > 1 else H * T
    window = window or Full()
    kind, size, keep = rule_of(window)
    least = least or (LEAST if B * blocks < limits.multiprocessors else LEAST_OF_MANY)
    if most_splits is None:
        most_splits = splits_for(B * blocks, reach(window), least, limits.multiprocessors)
    form: FormatName = "plain"
    if isinstance(new, Coded):
        form, store, scales, high = new.keys.form, new.k.codes, new.k.scales, new.k.high
    else:
        store = scales = high = new
    token_bytes = code_bytes(D, form) * store.element_size()
    means = torch.empty(B * blocks, most_splits, queries, rank, dtype=q.dtype, device=q.device)
    levels = torch.empty(B * blocks, queries, most_splits, device=q.device)
    launch(
        _attend_latent, (B * blocks, most_splits),
        means, levels, q, store, scales, high, table, size, keep, least, scale, *q.stride()[:3], *store.stride()[:2],
        T=T, H=H, RANK=rank, ROPE=D - rank,
        RANK_PAD=max(16, triton.next_power_of_2(rank)), ROPE_PAD=max(16, triton.next_power_of_2(D - rank)),
        M=M, ROWS=queries, QUERIES=blocks, KIND=kind, FORM=form, BLOCK=shape.block,
        AHEAD=tokens_ahead(kind, token_bytes, shape.block, limits) if ahead and not page else 0,
        STRETCH=plan.stretch, PAGE=page, num_warps=shape.warps, num_stages=stages_for(shape.stages, page),
    )  # fmt: skip
    return Parts(means, levels, B, H, T, M, window, least, shape.block)


def splits_for(groups: int, slots: int | None, least: int, multiprocessors: int) -> int:
    """How many parts a group may have: a program for each multiprocessor, and with many groups still some for one that
    is much longer than the others. `slots`: the most tokens a row can see, None where not known."""
    room = min(max(multiprocessors // groups, 4), MOST_SPLITS)
    return room if slots is None else max(1, min(room, triton.cdiv(slots, least)))


@dataclass(frozen=True)
class Plan:
    """How the kernel is launched: queries of a program, and how much of a latent in float32 is summed up apart."""

    queries: int
    shape: Shape
    stretch: int


@cache
def plan_for(itemsize: int, queries: int, rank: int, rope: int, coded: bool, limits: Limits) -> Plan:
    """For so many queries of a row. Where shared memory is short, a program has fewer of them before its blocks have
    less than 32 tokens, and sums in float32 are not taken apart."""
    most = min(max(16, triton.next_power_of_2(queries)), MOST_QUERIES[itemsize])
    rank, rope = max(16, triton.next_power_of_2(rank)), max(16, triton.next_power_of_2(rope))
    plans = (
        Plan(M, shape, stretch)
        for stretch in dict.fromkeys((min(STRETCH, rank), rank))
        for M in (most >> i for i in range(3))
        if M >= 16
        for shape in smaller(shape_for(itemsize, M, coded, limits), least=16 if M == 16 else 32)
    )
    return fitted(plans, lambda one: shared_bytes(one, rank, rope, itemsize, coded, limits), limits.shared)


def shape_for(itemsize: int, queries: int, coded: bool, limits: Limits) -> Shape:
    """The shape for so many queries of a program where there is room for it."""
    if coded and itemsize == 2:
        return CODED[queries]
    return SHAPES[itemsize, queries] if limits.capability[0] == 9 or itemsize == 4 else OTHERS


def shared_bytes(plan: Plan, rank: int, rope: int, itemsize: int, coded: bool, limits: Limits) -> int:
    """Shared memory of a program, at most: blocks of latents with their keys, queries, and shares on their way to the
    product with latents. In float32 every stretch has queries of its own, zeros elsewhere; codes come beside what is
    made of them, which sm_100 keeps twice."""
    (block, stages), width = (plan.shape.block, plan.shape.stages), rank + rope
    blocks = block * width * itemsize * limits.buffers(stages, block)
    times = rank // plan.stretch if itemsize == 4 else 1
    own = plan.queries * (rank * times + rope + block) * itemsize
    codes = block * (width + width // 8) * max(stages - 1, 1) if coded else 0
    codes += block * width * itemsize if coded and limits.capability[0] == 10 else 0
    return blocks + own + codes + 2 * KIB
