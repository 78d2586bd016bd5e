"""Norm and RoPE of queries and keys, and storing the new tokens in their slots, in one launch.

One program takes one head of one token: a query head is normed and rotated, a key head is also stored, a value head is
stored. The slot follows from the row's length, which is read on the device: slot p for position p in a line; in a ring
of R slots after `keep` first ones, keep + (p - keep) % R. Padding is not stored. Several tokens at once are stored in a
line immediately. In a ring they are stored at commit (`append`), when it is known which are accepted, and only the
newest R of them, so that no slot is written twice.

The references are `lamina.cache.step.Step.ready` and `lamina.cache.layers.layout.Layout.slots`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.entry import K_STORE, KEEP, RING, V_STORE, row_of
from lamina.kernels.launch import begin, launch
from lamina.kernels.slots import cell_of, first_cell, pages_of

if TYPE_CHECKING:
    from lamina.nn.norm import RMSNorm


# -- slots -----------------------------------------------------------------------------------------------------------


@triton.jit
def slot_at(table, position):
    """The slot of the token at `position`."""
    ring, keep = tl.load(table + RING), tl.load(table + KEEP)
    around = keep + (position - keep) % tl.maximum(ring, 1)
    return tl.where((ring == 0) | (position < keep), position, around)


@triton.jit
def keeps_slot(table, position, end):
    """Whether no later token of a pass that ends before position `end` takes the slot of the token at `position`."""
    ring, keep = tl.load(table + RING), tl.load(table + KEEP)
    return (ring == 0) | (position < keep) | (position >= end - ring)


@triton.jit
def cell_at(table, row, head, slot, real, HEADS: tl.constexpr, PAGE: tl.constexpr):
    """The cell of a slot (`slots.py`), counted from the start of the store; any cell where not real."""
    cell = cell_of(pages_of(table, row, PAGE), head, slot, real, HEADS, PAGE)
    return first_cell(table, row * HEADS + head, PAGE) + cell


@triton.jit
def slot_pointer(
    table, COLUMN: tl.constexpr, like, row, head, slot, real, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Pointer to the D values of a slot in the store of a column, of the type of pointer `like`."""
    return tl.load(table + COLUMN).to(like.dtype) + cell_at(table, row, head, slot, real, HEADS, PAGE) * D


# -- norm and rotation -----------------------------------------------------------------------------------------------


@triton.jit
def store_both(y, z, at, values, inside, stores, MOVES: tl.constexpr, WRITE: tl.constexpr):
    """Stores values at index `at` of the new head y (MOVES), and of the slot z where `stores` (WRITE)."""
    values = values.to(y.dtype.element_ty)
    if MOVES:
        tl.store(y + at, values, mask=inside)
    if WRITE:
        tl.store(z + at, values, mask=inside & stores)


@triton.jit
def norm_three(a, b, rest, scales, D, eps):
    """RMS norm of one head of D values that is held as three tensors; scales: the weight of each."""
    factor = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b) + tl.sum(rest * rest)) / D + eps)
    return a * factor * scales[0], b * factor * scales[1], rest * factor * scales[2]


@triton.jit
def norm_and_rotate(
    x, here, weight, eps, plus,  # pointers to N heads [N, 1], which of them exist [N, 1]; of the norm, weight [D]
    cos, sin, d,  # [PAIRS] twice; indices of values [D_PAD]
    D: tl.constexpr, PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Heads at x after norm and RoPE -> float32 [N, D_PAD].

    Each value is loaded together with its partner in the rotation, PAIRS values or one value away, so that a head stays
    one tensor; values past 2 · PAIRS are not rotated. NORMS: "first", "last" (after the rotation) or "".
    """
    inside = (d < D)[None, :] & here
    if NEIGHBOURS:
        partner, angle, sign = d ^ 1, d // 2, tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner, angle = tl.where(d < PAIRS, d + PAIRS, d - PAIRS), tl.where(d < PAIRS, d, d - PAIRS)
        sign = tl.where(d < PAIRS, -1.0, 1.0)
    rotates = d < 2 * PAIRS
    partner = tl.where(rotates, partner, d)
    y = tl.load(x + d[None, :], mask=inside, other=0.0).to(tl.float32)
    z = y
    if PAIRS:
        z = tl.load(x + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    own = 1.0
    if WEIGHTS:
        own = (tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32) + plus)[None, :]
    if NORMS == "first":
        factor = tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
        others = 1.0
        if WEIGHTS:
            others = (tl.load(weight + partner, mask=d < D, other=0.0).to(tl.float32) + plus)[None, :]
        y, z = y * factor * own, z * factor * others
    if PAIRS:
        c = tl.load(cos + angle, mask=rotates, other=1.0)[None, :]
        s = (tl.load(sin + angle, mask=rotates, other=0.0) * sign)[None, :]
        y = y * c + z * s
    if NORMS == "last":
        y *= tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None] * own
    return y


# -- the launch ------------------------------------------------------------------------------------------------------


@triton.jit
def _rotate(
    q, k, v, q_out, k_out,  # [B, Hq, T, D], [B, Hk, T, D], [B, Hk, T, DV], [B, T, Hq, D], [B, T, Hk, D]
    cos, sin, q_weight, k_weight, factor, table,  # [B, T, PAIRS] twice, [D] twice, [B, T]; the entry's table row
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,  # strides
    rope_row, rope_token, factor_row, factor_token,
    q_eps, k_eps, q_plus, k_plus,  # of the norms: `plus` is added to the weight
    T: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr, FACTOR: tl.constexpr,
    MOVES: tl.constexpr, WRITE: tl.constexpr,  # heads go to q_out and k_out; keys and values go to their slots
    FIRST: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, head): query heads from FIRST on, then key heads, then value heads."""
    row, t, head = tl.program_id(0) // T, tl.program_id(0) % T, tl.program_id(1) + FIRST
    length, count = row_of(table, row, T)
    real = (t < count) & keeps_slot(table, length + t, length + count)
    slot = tl.where(real, slot_at(table, length + t), 0)
    if head < Q_HEADS + K_HEADS:
        is_key = head >= Q_HEADS
        h = tl.where(is_key, head - Q_HEADS, head)
        if is_key:
            x = k + row * k_row + h * k_head + t * k_token
            y = k_out + ((row * T + t) * K_HEADS + h) * D
            weight, eps, plus = k_weight, k_eps, k_plus
        else:
            x = q + row * q_row + h * q_head + t * q_token
            y = q_out + ((row * T + t) * Q_HEADS + h) * D
            weight, eps, plus = q_weight, q_eps, q_plus
        z = y
        if WRITE:
            z = slot_pointer(table, K_STORE, k, row, h, slot, is_key & real, K_HEADS, D, PAGE)
        # A head is pairs (a, b), which are rotated, and the rest. Either may be empty.
        i, j = tl.arange(0, PAIRS_PAD), 2 * PAIRS + tl.arange(0, REST_PAD)
        if NEIGHBOURS:
            one, two = 2 * i, 2 * i + 1
        else:
            one, two = i, PAIRS + i
        inside, in_rest = i < PAIRS, j < D
        scales = (1.0, 1.0, 1.0)
        if WEIGHTS:
            scales = (tl.load(weight + one, mask=inside, other=0.0).to(tl.float32) + plus,
                      tl.load(weight + two, mask=inside, other=0.0).to(tl.float32) + plus,
                      tl.load(weight + j, mask=in_rest, other=0.0).to(tl.float32) + plus)  # fmt: skip
        begin(PDL)
        angle = row * rope_row + t * rope_token + i
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        a = tl.load(x + one, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + two, mask=inside, other=0.0).to(tl.float32)
        rest = tl.load(x + j, mask=in_rest, other=0.0).to(tl.float32)
        if NORMS == "first":
            a, b, rest = norm_three(a, b, rest, scales, D, eps)
        a, b = a * c - b * s, b * c + a * s
        if NORMS == "last":
            a, b, rest = norm_three(a, b, rest, scales, D, eps)
        if FACTOR:
            by = tl.load(factor + row * factor_row + t * factor_token)
            by = tl.where(is_key, 1.0, by)
            a, b, rest = a * by, b * by, rest * by
        stores = is_key & real
        store_both(y, z, one, a, inside, stores, MOVES, WRITE)
        store_both(y, z, two, b, inside, stores, MOVES, WRITE)
        store_both(y, z, j, rest, in_rest, stores, MOVES, WRITE)
    else:
        begin(PDL)
        if WRITE:
            h = head - Q_HEADS - K_HEADS
            d = tl.arange(0, DV_PAD)
            values = tl.load(v + row * v_row + h * v_head + t * v_token + d, mask=d < DV, other=0.0)
            at = slot_pointer(table, V_STORE, v, row, h, slot, real, K_HEADS, DV, PAGE)
            tl.store(at + d, values, mask=(d < DV) & real)


def norm_arguments(norms: tuple[RMSNorm, RMSNorm] | None, like: Tensor) -> tuple[list[Tensor], list[float]]:
    """The norms of queries and keys as kernels take them: -> (their weights, [q_eps, k_eps, q_plus, k_plus]).

    Where there is no norm or no weight, `like` stands for the weight; kernels do not read it.
    """
    if norms is None:
        return [like, like], [0.0] * 4
    weights = [like if norm.weight is None else norm.weight for norm in norms]
    return weights, [norm.eps for norm in norms] + [float(norm.plus_one) for norm in norms]


def rotate_and_append(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hk, T, D]
    v: Tensor,  # [B, Hk, T, Dv]; Dv is 0 where only keys are stored
    rope: tuple[Tensor, Tensor] | None,  # cos and sin, float32 [B, T, P]: the first 2 P values of a head are rotated
    table: Tensor,  # the row of the cache's table for this entry
    *,
    neighbours: bool = False,
    norms: tuple[RMSNorm, RMSNorm] | None = None,  # of each query head and each key head
    norms_last: bool = False,
    factor: Tensor | None = None,  # [B, T], multiplies queries
    write: bool,
    page: int = 0,  # slots per page; 0 without pages
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and RoPE of q and k into new tensors, whose memory is [B, T, H, D]; -> (q, k, v), [B, H, T, D] each.

    With `write`, real new keys and values go to their slots: in a line any number of tokens, in a ring one, or several
    at commit (`append`). The last axis of q, k and v is contiguous. `neighbours` rotates pairs (2i, 2i + 1) instead of
    (i, i + P). The norm comes before the rotation, or after it with `norms_last`; both norms have weights, or neither.
    """
    B, Hq, T, D = q.shape
    Hk, Dv = k.shape[1], v.shape[3]
    moves = rope is not None or norms is not None or factor is not None
    if not moves and not write:
        return q, k, v
    cos, sin = (q, q) if rope is None else rope
    pairs = 0 if rope is None else cos.shape[-1]
    weights, scalars = norm_arguments(norms, q)
    q_out, k_out = q, k
    if moves:
        q_out = torch.empty(B, T, Hq, D, dtype=q.dtype, device=q.device)
        k_out = torch.empty(B, T, Hk, D, dtype=k.dtype, device=k.device)
    first = 0 if moves else Hq  # queries that do not change need no program
    launch(
        _rotate, (B * T, Hq - first + Hk * (2 if write and Dv else 1)),
        q, k, v, q_out, k_out, cos, sin, *weights, q if factor is None else factor, table,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *cos.stride()[:2],
        *((0, 0) if factor is None else factor.stride()), *scalars,
        T=T, Q_HEADS=Hq, K_HEADS=Hk, D=D, DV=Dv, PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(max(pairs, 1)),
        REST_PAD=triton.next_power_of_2(max(D - 2 * pairs, 1)), DV_PAD=triton.next_power_of_2(max(Dv, 1)),
        NEIGHBOURS=neighbours, NORMS="" if norms is None else "last" if norms_last else "first",
        WEIGHTS=norms is not None and norms[0].weight is not None, FACTOR=factor is not None, MOVES=moves,
        WRITE=write, FIRST=first, PAGE=page, num_warps=1,
    )  # fmt: skip
    return (q_out.transpose(1, 2), k_out.transpose(1, 2), v) if moves else (q, k, v)


def rotate_queries(q: Tensor, table: Tensor, **before: Any) -> Tensor:
    """Norm and RoPE of q alone, [B, Hq, T, D]; `before`: as `rotate_and_append` takes it."""
    none = q[:, :0]
    return rotate_and_append(q, none, none, table=table, write=False, **before)[0]


def append(k: Tensor, v: Tensor, table: Tensor, page: int = 0) -> None:
    """Stores keys and values [B, H, T, D] as they are: the first `counts` tokens of each row, in their slots."""
    rotate_and_append(k, k, v, None, table, write=True, page=page)


@triton.jit
def _angles(
    positions, frequencies, cos, sin, scale,  # int64 [B · T], float32 [P], float32 [B · T, P] twice
    P: tl.constexpr, P_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token): its row of the rotary table."""
    token, i = tl.program_id(0), tl.arange(0, P_PAD)
    frequency = tl.load(frequencies + i, mask=i < P, other=0.0)
    begin(PDL)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    tl.store(cos + token * P + i, tl.cos(angle) * scale, mask=i < P)
    tl.store(sin + token * P + i, tl.sin(angle) * scale, mask=i < P)


def rotary_table(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The table of `lamina.nn.Rotary`: positions [B, T], frequencies [P] -> cos and sin [B, T, P], times `scale`."""
    pairs = frequencies.shape[0]
    cos, sin = (torch.empty(*positions.shape, pairs, device=positions.device) for _ in range(2))
    launch(
        _angles, (positions.numel(),),
        positions.contiguous(), frequencies, cos, sin, scale,
        P=pairs, P_PAD=triton.next_power_of_2(pairs), num_warps=1,
    )  # fmt: skip
    return cos, sin
