"""Rotary embedding of queries and keys, and the new tokens into their slots, in one launch.

A program takes one head of one token: a query head is turned, a key head is turned and stored, a value head is stored.
Slots follow from the row's length, read on the device: in a line slot p, in a ring behind `keep` first ones
keep + (p - keep) % R. Padding is not stored. Several tokens at once go into a line but not into a ring, where the cache
stores the accepted ones at commit.

The references are `lamina.nn.rotary.rotate`, `rotate_neighbours` and `lamina.cache.layout.Layout.slots`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.launch import begin, launch_options, pdl
from lamina.kernels.splits import row_of


@triton.jit
def slot_at(table, position):
    ring, keep = tl.load(table + 3), tl.load(table + 4)
    around = keep + (position - keep) % tl.maximum(ring, 1)
    return tl.where((ring == 0) | (position < keep), position, around)


@triton.jit
def store_at(table, FIELD: tl.constexpr, like, row, head, slot, HEADS, D):
    """Where the numbers of a slot begin: the store is [B, HEADS, S, D]."""
    base = tl.load(table + FIELD).to(like.dtype)
    return base + ((row * HEADS + head).to(tl.int64) * tl.load(table + 2) + slot) * D


@triton.jit
def _rotate(
    q, k, v, q_out, k_out, cos, sin, table,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, rope_row, rope_token,
    T: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    NEIGHBOURS: tl.constexpr, WRITE: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, t, head = tl.program_id(0) // T, tl.program_id(0) % T, tl.program_id(1) + FIRST
    length, count = row_of(table, row, T)
    real = t < count
    slot = tl.where(real, slot_at(table, length + t), 0)
    begin(PDL)
    if head < Q_HEADS + K_HEADS:
        is_key = head >= Q_HEADS
        h = tl.where(is_key, head - Q_HEADS, head)
        if is_key:
            x = k + row * k_row + h * k_head + t * k_token
            y = k_out + ((row * T + t) * K_HEADS + h) * D
        else:
            x = q + row * q_row + h * q_head + t * q_token
            y = q_out + ((row * T + t) * Q_HEADS + h) * D
        stores = is_key & real
        if WRITE:
            z = store_at(table, 0, k, row, h, slot, K_HEADS, D)
        if PAIRS:
            i = tl.arange(0, PAIRS_PAD)
            if NEIGHBOURS:
                one, two = 2 * i, 2 * i + 1
            else:
                one, two = i, PAIRS + i
            inside = i < PAIRS
            angle = row * rope_row + t * rope_token + i
            c = tl.load(cos + angle, mask=inside, other=0.0)
            s = tl.load(sin + angle, mask=inside, other=0.0)
            a = tl.load(x + one, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + two, mask=inside, other=0.0).to(tl.float32)
            turned_a = (a * c - b * s).to(k.dtype.element_ty)
            turned_b = (b * c + a * s).to(k.dtype.element_ty)
            tl.store(y + one, turned_a, mask=inside)
            tl.store(y + two, turned_b, mask=inside)
            if WRITE:
                tl.store(z + one, turned_a, mask=inside & stores)
                tl.store(z + two, turned_b, mask=inside & stores)
        if REST_PAD:  # numbers that are not turned
            j = 2 * PAIRS + tl.arange(0, REST_PAD)
            rest = tl.load(x + j, mask=j < D, other=0.0)
            if PAIRS:
                tl.store(y + j, rest, mask=j < D)
            if WRITE:
                tl.store(z + j, rest, mask=(j < D) & stores)
    else:
        if WRITE:
            h = head - Q_HEADS - K_HEADS
            d = tl.arange(0, DV_PAD)
            values = tl.load(v + row * v_row + h * v_head + t * v_token + d, mask=d < DV, other=0.0)
            tl.store(store_at(table, 1, v, row, h, slot, K_HEADS, DV) + d, values, mask=(d < DV) & real)


def rotate_and_append(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hk, T, D]
    v: Tensor,  # [B, Hk, T, Dv]
    rope: tuple[Tensor, Tensor] | None,  # cos and sin, float32 [B, T, P]: the first 2 P numbers of a head are turned
    table: Tensor,  # the row of the cache's table for this entry
    *,
    neighbours: bool = False,
    write: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turns q and k into new tensors, [B, T, H, D] seen as [B, H, T, D]; returns them and v.

    With `write`, real new keys and values go to their slots: into a line any number of tokens, into a ring one. The
    last axis of q, k and v is contiguous. `neighbours` pairs every number with the one beside it, not half a head away.
    """
    B, Hq, T, D = q.shape
    Hk, Dv = k.shape[1], v.shape[3]
    if rope is None and not write:
        return q, k, v
    turns = rope is not None
    cos, sin = rope if rope is not None else (q, q)
    pairs = cos.shape[-1] if turns else 0
    q_out, k_out = q, k
    if turns:
        q_out = torch.empty(B, T, Hq, D, dtype=q.dtype, device=q.device)
        k_out = torch.empty(B, T, Hk, D, dtype=k.dtype, device=k.device)
    first = 0 if turns else Hq  # queries that are not turned stay where they are
    _rotate[(B * T, Hq - first + Hk * (2 if write else 1))](
        q, k, v, q_out, k_out, cos, sin, table,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *cos.stride()[:2],
        T=T, Q_HEADS=Hq, K_HEADS=Hk, D=D, DV=Dv, PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(max(pairs, 1)),
        REST_PAD=triton.next_power_of_2(D - 2 * pairs) if 2 * pairs < D else 0, DV_PAD=triton.next_power_of_2(Dv),
        NEIGHBOURS=neighbours, WRITE=write, FIRST=first, PDL=pdl(), num_warps=1, **launch_options(),
    )  # fmt: skip
    return (q_out.transpose(1, 2), k_out.transpose(1, 2), v) if turns else (q, k, v)
