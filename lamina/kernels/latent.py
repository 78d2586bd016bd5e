"""Decode attention in the latent (MLA, absorbed): one vector a token serves as key and value of every head.

A slot holds [latent | rotary key]. The key is all of it, the value its first `rank` numbers, so a block is read once
and used in three products: two for the scores, one for the mix. All heads times new tokens are the rows of the
products; the history is never expanded. Everything else is as in `attend`. A part is `rank` numbers for each query, too
much for one program to merge, so the second kernel does it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.window import Full, Window
from lamina.errors import InputError
from lamina.kernels.attend import MOST_QUERIES, Shape
from lamina.kernels.launch import begin, launch_options, pdl
from lamina.kernels.splits import (
    NEW,
    NOTHING,
    TAIL,
    cut,
    first_seen,
    fold,
    leave,
    merge_parts,
    position_of,
    reach,
    row_of,
    rule_of,
    scored,
    slot_of,
    splits_for,
    visible,
    write,
)

# By bytes of one number, and by queries in a program.
SHAPES = {
    (2, 16): Shape(32, 8, 3),
    (2, 32): Shape(32, 8, 3),
    (2, 64): Shape(32, 8, 3),
    (4, 16): Shape(16, 8, 3),
}
LEAST = 128  # tokens a part has at least: a slot is as long as the keys and values of four heads


@triton.jit
def _attend_latent(
    out, q, new, parts, table, size, keep, least, scale, q_row, q_head, q_token, new_row, new_token,
    T: tl.constexpr, H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    group, split, most = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, block = group // QUERIES, group % QUERIES
    length, count = row_of(table, row, T)
    kept, first, many, ring = visible(table, length, count, size, keep, KIND)
    each, used = cut(many, most, least, BLOCK)
    if split >= used:
        return
    begin(PDL)

    c, p = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, ROPE_PAD)[None, :]
    inner = tl.arange(0, M)  # this program's queries: token t of head r // T
    r = block * M + inner
    t = r % T
    low = first_seen(length + t, size, KIND)  # [M]
    ours = q + (row * q_row + r // T * q_head + t * q_token)[:, None]
    real = (r < H * T)[:, None]
    q_latent = tl.load(ours + c, mask=real & (c < RANK), other=0.0)
    q_rope = tl.load(ours + RANK + p, mask=real & (p < ROPE), other=0.0)
    top, total = tl.full([M], NOTHING, tl.float32), tl.zeros([M], tl.float32)
    mix = tl.zeros([M, RANK_PAD], tl.float32)

    store = tl.multiple_of(tl.multiple_of(tl.load(table), 16).to(new.dtype), 16)
    store += row.to(tl.int64) * tl.load(table + 2) * (RANK + ROPE)
    begins = split * each
    ends = tl.minimum(begins + each, many)
    for start in range(begins, ends, BLOCK):
        j = start + tl.arange(0, BLOCK)
        there = (j < ends)[:, None]
        at = store + (slot_of(j, kept, first, ring, keep) * (RANK + ROPE))[:, None]
        latents = tl.load(at + c, mask=there & (c < RANK), other=0.0)
        ropes = tl.load(at + RANK + p, mask=there & (p < ROPE), other=0.0)
        products = tl.dot(q_latent, tl.trans(latents), input_precision="ieee")
        products = tl.dot(q_rope, tl.trans(ropes), products, input_precision="ieee")
        seen = (j < ends)[None, :]
        if KIND != "full" and T > 1:
            position = position_of(j, kept, first)[None, :]
            seen = seen & ((position >= low[:, None]) | (position < keep))
        top, total, mix = fold(top, total, mix, scored(products, scale, 1.0, False), seen, latents)

    if split == used - 1:  # the shortest part takes the new tokens too
        u = tl.arange(0, NEW)
        at_new, is_new = new + (row * new_row + u * new_token)[:, None], (u < count)[:, None]
        new_latents = tl.load(at_new + c, mask=is_new & (c < RANK), other=0.0)
        new_ropes = tl.load(at_new + RANK + p, mask=is_new & (p < ROPE), other=0.0)
        new_products = tl.dot(q_latent, tl.trans(new_latents), input_precision="ieee")
        new_products = tl.dot(q_rope, tl.trans(new_ropes), new_products, input_precision="ieee")
        sees_new = (u < count)[None, :] & (u[None, :] <= t[:, None])
        if KIND != "full":
            new_position = (length + u)[None, :]
            sees_new = sees_new & ((new_position >= low[:, None]) | (new_position < keep))
        new_scores = scored(new_products, scale, 1.0, False)
        top, total, mix = fold(top, total, mix, new_scores, sees_new, new_latents)

    column = tl.arange(0, RANK_PAD)
    if used == 1:
        write(out, top, total, mix, out, row, 0, r, column, count, T, H, 1, RANK, False)
    else:
        leave(parts, top, total, mix, group, split, most, inner, column, ROWS, RANK)


def decode_latent(
    q: Tensor,  # [B, H, T, rank + rope]: the way up already folded in
    new: Tensor,  # [B, T, rank + rope]: this pass's own tokens
    table: Tensor,  # the row of the cache's table for this entry
    *,
    rank: int,
    scale: float,
    window: Window | None = None,
    most_splits: int | None = None,
    shape: Shape | None = None,
    least: int = LEAST,
) -> Tensor:
    """Attention of up to 16 new tokens over the latents that the cache's rows hold and their own: [B, H, T, rank].

    As `decode_attention` with one key head and values = keys[..., :rank].
    """
    B, H, T, D = q.shape
    if not 1 <= T <= NEW.value:
        raise InputError(
            f"{T} new tokens a row: decode attention takes 1 to {NEW.value}, use lamina.attention for more"
        )
    M = min(max(16, triton.next_power_of_2(H * T)), MOST_QUERIES[q.element_size()])
    blocks = triton.cdiv(H * T, M)
    rows = M if blocks > 1 else H * T
    shape = shape or SHAPES[q.element_size(), M]
    window = window or Full()
    kind, size, keep = rule_of(window)
    if most_splits is None:  # parts are large here: one program a multiprocessor
        most_splits = splits_for(B * blocks, 1, reach(window), waves=1, least=least)
    out = torch.empty(B, T, H, rank, dtype=q.dtype, device=q.device)
    parts = out
    if most_splits > 1:
        parts = torch.empty(B * blocks, most_splits, rows, rank + TAIL.value, dtype=torch.float32, device=q.device)
    _attend_latent[(B * blocks, most_splits)](
        out, q, new, parts, table, size, keep, least, scale, *q.stride()[:3], *new.stride()[:2],
        T=T, H=H, RANK=rank, ROPE=D - rank,
        RANK_PAD=max(16, triton.next_power_of_2(rank)), ROPE_PAD=max(16, triton.next_power_of_2(D - rank)),
        M=M, ROWS=rows, QUERIES=blocks, KIND=kind, BLOCK=shape.block,
        PDL=pdl(), num_warps=shape.warps, num_stages=shape.stages, **launch_options(),
    )  # fmt: skip
    if most_splits > 1:
        merge_parts(
            out, parts, None, table, (kind, size, keep), heads=1, queries=blocks, least=least, block=shape.block
        )
    return out.transpose(1, 2)
