"""Latent attention of many queries, each over the tokens that an indexer selected for it, for prompts.

As in `mla.py`, all heads read one vector per token, and products have tokens or the rank as rows. The heads of one
query share its list of positions, so they are the queries of one or a few programs. Nothing else of the row is read,
and there is no query × key mask. Prompts have programs enough, so a list is not split.

The reference is `lamina.attention.reference_attention` over `View.restricted`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.cache.codec.registry import FormatName
from lamina.kernels.attention.indexer import NONE, Marks, length_and_count
from lamina.kernels.attention.mla import plan_for
from lamina.kernels.attention.online_softmax import LOG2E, LOWEST
from lamina.kernels.entry import K_HIGH, K_SCALES, STORE, store_pointer
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import limits_of
from lamina.kernels.quant.dequantize import dequantize, materialize
from lamina.kernels.quant.field import Coded
from lamina.kernels.quant.layout import code_bytes, high_bytes, scale_values
from lamina.kernels.slots import cells_in, first_cell, pages_of, stages_for


def attend_selected(
    q: Tensor,  # [B, H, N, rank + rope]: queries first … first + N - 1 of each row, projected into the latent space
    new: Tensor | Coded,  # this pass's tokens, which are in their slots; only its types are used
    table: Tensor,  # the row of the cache's table for this entry
    chosen: Tensor,  # int32 [B, T, top]: positions to attend to, from `indexer.select_in_turns`
    *,
    rank: int,
    scale: float,
    page: int = 0,  # slots per page; 0 without pages
    first: int = 0,
    marks: Marks | None = None,  # with which the tokens were selected: lists end with -1
) -> Tensor:
    """-> mean of latents [B, H, N, rank], a view of a tensor [B, N, H, rank]; zeros for padding"""
    (B, H, N, D), (T, top) = q.shape, chosen.shape[1:]
    limits = limits_of(q.device)
    form: FormatName = "plain"
    if isinstance(new, Coded):
        form, store, scales, high = new.keys.form, new.k.codes, new.k.scales, new.k.high
    else:
        store = scales = high = new
    plan = plan_for(q.element_size(), H, rank, D - rank, isinstance(new, Coded), limits)
    blocks = triton.cdiv(H, plan.queries)
    out = torch.empty(B, N, H, rank, dtype=q.dtype, device=q.device)
    launch(
        _attend_selected, (N * blocks, B),
        out, q, store, scales, high, chosen, table, *(marks or NONE)[:2], T, first, N, blocks, top, scale,
        *q.stride()[:3],
        H=H, RANK=rank, ROPE=D - rank,
        RANK_PAD=max(16, triton.next_power_of_2(rank)), ROPE_PAD=max(16, triton.next_power_of_2(D - rank)),
        M=plan.queries, FORM=form, BLOCK=plan.shape.block, PAGE=page,
        num_warps=plan.shape.warps, num_stages=stages_for(plan.shape.stages, page),
    )  # fmt: skip
    return out.transpose(1, 2)


@triton.jit(do_not_specialize=["T", "first", "N", "blocks"])  # one kernel for many numbers of tokens
def _attend_selected(
    out, q,  # [B, N, H, RANK], [B, H, N, RANK + ROPE]
    store, scales, high,  # tensors with the types of the stored parts
    chosen, table,  # int32 [B, T, top]; the entry's table row
    firsts, stops,  # [B, T] of `Marks`; None without
    T, first, N, blocks, top, scale,  # new tokens of a row; queries first … first + N - 1; blocks of M heads
    q_row, q_head, q_token,  # strides
    H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    M: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i · blocks + block, row): M heads of query first + i of a row, over its selected tokens."""
    WIDTH: tl.constexpr = code_bytes(RANK + ROPE, FORM)  # values per slot, or bytes of codes
    i, block, row = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1).to(tl.int64)
    t = first + i
    length, count = length_and_count(table, row, T)
    sees = length + t + 1
    if firsts is not None:
        sees = tl.load(stops + row * T + t) - tl.load(firsts + row * T + t)
    n = tl.where(t < count, tl.minimum(sees, top), 0)
    origin, pages = first_cell(table, row, PAGE), pages_of(table, row, PAGE)
    latents_at = store_pointer(table, STORE, store.dtype) + origin * WIDTH
    if FORM != "plain":
        scales = tl.multiple_of(tl.load(table + K_SCALES), 4).to(scales.dtype)
        scales += origin * scale_values(RANK + ROPE, FORM)
        high = tl.load(table + K_HIGH).to(high.dtype) + origin * high_bytes(RANK + ROPE, FORM)
    chosen += (row * T + t) * top
    begin(PDL)

    c, p = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, ROPE_PAD)[None, :]
    h = block * M + tl.arange(0, M)
    real = (h < H)[:, None]
    ours = q + (row * q_row + h * q_head + i * q_token)[:, None]
    q_latent = tl.trans(tl.load(ours + c, mask=real & (c < RANK), other=0.0))  # [RANK, M]
    q_rope = tl.trans(tl.load(ours + RANK + p, mask=real & (p < ROPE), other=0.0))  # [ROPE, M]
    highest, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    mix = tl.zeros([RANK_PAD, M], tl.float32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        slot, seen = tl.load(chosen + j, mask=j < n, other=0), (j < n)[:, None]
        if firsts is not None:
            seen = seen & (slot >= 0)[:, None]
        cell = cells_in(pages, 0, slot, start, n, 1, PAGE, "selected", BLOCK)[:, None]
        at = latents_at + cell * WIDTH
        if FORM == "plain":
            latents = tl.load(at + c, mask=seen & (c < RANK), other=0.0)  # [BLOCK, RANK]
            ropes = tl.load(at + RANK + p, mask=seen & (p < ROPE), other=0.0)  # [BLOCK, ROPE]
        else:
            by, above = scales + cell * scale_values(RANK + ROPE, FORM), high + cell * high_bytes(RANK + ROPE, FORM)
            latents = dequantize(at, by, above, seen, 0, RANK, RANK_PAD, RANK + ROPE, FORM)
            latents = materialize(latents.to(q.dtype.element_ty))
            ropes = dequantize(at, by, above, seen, RANK, ROPE, ROPE_PAD, RANK + ROPE, FORM).to(q.dtype.element_ty)
        scores = tl.dot(latents, q_latent, input_precision="ieee")
        scores = tl.dot(ropes, q_rope, scores, input_precision="ieee") * (scale * LOG2E)  # [BLOCK, M]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=0))
        probs, rescale = tl.exp2(scores - higher[None, :]), tl.exp2(highest - higher)
        total = total * rescale + tl.sum(probs, axis=0)
        mix = tl.dot(tl.trans(latents), probs.to(latents.dtype), mix * rescale[None, :], input_precision="ieee")
        highest = higher
    mean = mix / tl.where(total > 0, total, 1.0)[None, :]
    place = ((row * N + i) * H + h)[None, :] * RANK + tl.arange(0, RANK_PAD)[:, None]
    inside = (h < H)[None, :] & (tl.arange(0, RANK_PAD) < RANK)[:, None]
    tl.store(out + place, mean.to(out.dtype.element_ty), mask=inside)
