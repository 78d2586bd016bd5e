"""Quantizes new tokens and prepares queries: one launch before attention over codes.

One program takes one head of one token. It applies norm and RoPE to a query or key head (as `rope_append` does), unless
that is done already. A key or value head has the key mean subtracted, is Hadamard-rotated and quantized, exactly as
`lamina.cache.codec.formats` does it, and goes to its slot. Attention reads new tokens from there too: they are seen as
they are stored. A query head is rotated as the keys are. With 16-bit queries it is divided by its largest magnitude, so
that float16 holds it. `query_terms` get that magnitude, the product of the query with the key mean, and the query's sum
over each group, which the groups' offsets are multiplied by.

Padding is not stored. Without `write` nothing is stored in slots, because several tokens at once go into a ring only
when they are accepted: the quantized tokens go to tensors of this pass instead (`Parts`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.attention.rope_append import cell_at, keeps_slot, norm_and_rotate, norm_arguments, slot_at
from lamina.kernels.entry import K_HIGH, K_SCALES, K_STORE, V_HIGH, V_SCALES, V_STORE, row_of
from lamina.kernels.launch import begin, launch
from lamina.kernels.quant.dequantize import hadamard32
from lamina.kernels.quant.field import Coded, Side
from lamina.kernels.quant.layout import (
    GROUP,
    code_bytes,
    groups_of,
    high_bytes,
    padded_groups,
    scale_values,
    value_at,
)

if TYPE_CHECKING:
    from lamina.nn.norm import RMSNorm

SMALLEST = tl.constexpr(2.0**-24)  # positive float16
HALFWAY = tl.constexpr(1.5 * 2**23)  # added and subtracted, it rounds to the nearest integer, halves to even


# -- rounding --------------------------------------------------------------------------------------------------------


@triton.jit
def round_to_half(x):
    """The nearest float16, as a float32."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.float32)


@triton.jit
def half_at_least(x):
    """A float16 value that is no less than x >= 0, as a float32."""
    return round_to_half(x * (1 + 2.0**-10) + SMALLEST / 2)


@triton.jit
def inverse(scale):
    """1 / scale, and 0 where the scale is 0."""
    return tl.where(scale > 0, tl.math.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def to_fp8(x):
    """The code of the float8 e4m3 nearest to x, |x| <= 448."""
    size = tl.abs(x)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    step = ((127 + 3 - exponent) << 23).to(tl.float32, bitcast=True)  # one over a step of the mantissa
    steps = (size * step + HALFWAY) - HALFWAY
    return tl.where(x < 0, 128, 0) + (exponent + 6) * 8 + steps.to(tl.int32)


# -- one head --------------------------------------------------------------------------------------------------------


@triton.jit
def in_groups(centre, D: tl.constexpr, FORM: tl.constexpr, CENTRED: tl.constexpr):
    """A head as rows of groups -> (group [G, 1]; index of each value, whether it exists, its key mean [G, 32] each)."""
    G: tl.constexpr = padded_groups(D)
    group, e = tl.arange(0, G)[:, None], tl.arange(0, GROUP)[None, :]
    d, there = value_at(group * GROUP + e, D, FORM)
    mean = tl.zeros([G, GROUP], tl.float32)
    if CENTRED:
        mean = tl.load(centre + d, mask=there, other=0.0)
    return group, d, there, mean


@triton.jit
def load_head(
    x, d, there, weight, eps, plus, factor, cos, sin,
    D: tl.constexpr, PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Values d [groups, 32] of the head at x, after norm, RoPE and `factor`, rounded to the dtype of x -> float32."""
    if PAIRS == 0 and NORMS == "":
        values = tl.load(x + d, mask=there, other=0.0).to(tl.float32)
    else:
        N: tl.constexpr = d.shape[0] * d.shape[1]
        one = tl.zeros([1, 1], tl.int32)
        at = tl.reshape(tl.where(there, d, D), [N])
        values = norm_and_rotate(
            x + one, one == 0, weight, eps, plus, cos, sin, at, D, PAIRS, NEIGHBOURS, NORMS, WEIGHTS
        )
        values = tl.reshape(values, d.shape)
    return (values * factor).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def encode_head(
    x, weight, eps, plus, cos, sin, centre,  # pointers to the head [D], norm weight [D], angles [PAIRS], key mean [D]
    codes, scales, high, table,  # this pass's parts [B, H, T, width]; the entry's table row
    place, cell, stores,  # where the token is among the parts, or in the store; whether it is stored
    CODES: tl.constexpr, SCALES: tl.constexpr, HIGH: tl.constexpr,  # columns of the table
    D: tl.constexpr, FORM: tl.constexpr, HADAMARD: tl.constexpr, CENTRED: tl.constexpr,
    PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr, WRITE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantizes the head at x: into `cell` of the store with WRITE, else to `place` of this pass's parts."""
    G: tl.constexpr = padded_groups(D)
    CODE_BYTES: tl.constexpr = code_bytes(D, FORM)
    SCALE_VALUES: tl.constexpr = scale_values(D, FORM)
    HIGH_BYTES: tl.constexpr = high_bytes(D, FORM)
    if WRITE:
        place = cell
        codes = tl.load(table + CODES).to(codes.dtype)
        scales = tl.load(table + SCALES).to(scales.dtype)
        high = tl.load(table + HIGH).to(high.dtype)
    codes += place * CODE_BYTES
    scales += place * SCALE_VALUES
    high += place * HIGH_BYTES
    group, d, there, mean = in_groups(centre, D, FORM, CENTRED)
    begin(PDL)
    values = load_head(x, d, there, weight, eps, plus, 1.0, cos, sin, D, PAIRS, NEIGHBOURS, NORMS, WEIGHTS)
    if FORM == "plain":
        tl.store(codes + d, values.to(codes.dtype.element_ty), mask=there & stores)
    else:
        values -= mean
        if FORM == "fp8":
            scale = half_at_least(tl.math.div_rn(tl.max(tl.abs(values)), 448.0))
            scaled = tl.minimum(tl.maximum(values * inverse(scale), -448.0), 448.0)
            tl.store(codes + d, to_fp8(scaled).to(tl.uint8), mask=there & stores)
            tl.store(scales, scale.to(tl.float16), mask=stores)
        else:
            MOST: tl.constexpr = 2**FORM - 1
            if HADAMARD:
                whole = (group + 1) * GROUP <= D  # a smaller last group is not rotated
                values = tl.where(whole, hadamard32(values, G), values)
            real = group * GROUP < D
            least = tl.min(tl.where(there, values, tl.where(real, float("inf"), 0.0)), axis=1, keep_dims=True)
            most = tl.max(tl.where(there, values, tl.where(real, float("-inf"), 0.0)), axis=1, keep_dims=True)
            # Offsets are rounded down and scales up, so that the codes cover the whole range of the group.
            offset = round_to_half(least - tl.abs(least) * 2.0**-10)
            scale = half_at_least(tl.math.div_rn(most - offset, MOST * 1.0))
            nearest = (values - offset) * inverse(scale) + HALFWAY - HALFWAY
            code = tl.minimum(tl.maximum(nearest, 0.0), MOST * 1.0).to(tl.int32)
            tl.store(scales + 2 * group, scale.to(tl.float16), mask=real & stores)
            tl.store(scales + 2 * group + 1, offset.to(tl.float16), mask=real & stores)
            if FORM == 8:
                tl.store(codes + d, code.to(tl.uint8), mask=there & stores)
            else:
                code = tl.where(there, code, 0)
                low, up = tl.split(tl.permute(tl.reshape(code & 15, [G, 2, 16]), (0, 2, 1)))
                size = tl.minimum(D - group * GROUP, GROUP)
                i = tl.arange(0, 16)[None, :]
                packed = (low | up << 4).to(tl.uint8)
                tl.store(codes + group * 16 + i, packed, mask=(i < (size + 1) // 2) & stores)
                bytes = (size + 7) // 8  # that hold one bit of every code of the group
                n = d % GROUP
                for plane in tl.static_range(FORM - 4):
                    flags = (code >> 4 + plane & 1) << n % 8
                    for m in tl.static_range(4):
                        byte = tl.sum(tl.where(n // 8 == m, flags, 0), axis=1, keep_dims=True)
                        at = group * (4 * (FORM - 4)) + plane * bytes + m
                        tl.store(high + at, byte.to(tl.uint8), mask=(m < bytes) & stores)


@triton.jit
def prepare_query(
    x, weight, eps, plus, factor, cos, sin, y, query_terms, centre,  # y [D], query_terms [2 + groups], of this head
    D: tl.constexpr, FORM: tl.constexpr, HADAMARD: tl.constexpr, CENTRED: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The query head at x: after norm and RoPE, Hadamard-rotated and scaled, to y; its terms to `query_terms`."""
    G: tl.constexpr = padded_groups(D)
    group, d, there, mean = in_groups(centre, D, FORM, CENTRED)
    begin(PDL)
    by = 1.0
    if FACTOR:
        by = tl.load(factor)
    values = load_head(x, d, there, weight, eps, plus, by, cos, sin, D, PAIRS, NEIGHBOURS, NORMS, WEIGHTS)
    product = tl.sum(values * mean)
    if HADAMARD:
        values = tl.where((group + 1) * GROUP <= D, hadamard32(values, G), values)
    largest = 1.0
    if y.dtype.element_ty == tl.float16:
        largest = tl.max(tl.abs(values))
        values = values * inverse(largest)
    values = values.to(y.dtype.element_ty)
    tl.store(y + d, values, mask=there)
    tl.store(query_terms, largest)
    tl.store(query_terms + 1, product)
    # Sums of the rounded values: the products with the codes see these too.
    tl.store(query_terms + 2 + group, tl.sum(values.to(tl.float32), axis=1, keep_dims=True), mask=group * GROUP < D)


# -- the launch ------------------------------------------------------------------------------------------------------


@triton.jit
def _encode(
    q, k, v,  # [B, Hq, T, D], [B, Hk, T, D], [B, Hk, T, DV]
    cos, sin, q_weight, k_weight, factor,  # [B, T, PAIRS] twice, [D] twice, [B, T]
    q_out, query_terms, centre,  # [B, T, Hq, D], [B, T, Hq, 2 + groups], [Hk, D]
    k_codes, k_scales, k_high, v_codes, v_scales, v_high,  # this pass's parts, [B, Hk, T, width] each
    table,  # the entry's table row
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token,  # strides
    rope_row, rope_token, factor_row, factor_token,
    q_eps, k_eps, q_plus, k_plus,  # of the norms: `plus` is added to the weight
    T: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,  # formats
    K_HADAMARD: tl.constexpr, V_HADAMARD: tl.constexpr, CENTRED: tl.constexpr,
    PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr, FACTOR: tl.constexpr,
    WRITE: tl.constexpr, FIRST: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, head): query heads from FIRST on, then key heads, then value heads."""
    row, t, head = tl.program_id(0) // T, tl.program_id(0) % T, tl.program_id(1) + FIRST
    cos += row * rope_row + t * rope_token
    sin += row * rope_row + t * rope_token
    if head < Q_HEADS:
        if FIRST == 0:
            mine = (row * T + t) * Q_HEADS + head
            prepare_query(
                q + row * q_row + head * q_head + t * q_token, q_weight, q_eps, q_plus,
                factor + row * factor_row + t * factor_token, cos, sin, q_out + mine * D,
                query_terms + mine * (2 + groups_of(D)), centre + head // (Q_HEADS // K_HEADS) * D,
                D, KEYS, K_HADAMARD, CENTRED, PAIRS, NEIGHBOURS, NORMS, WEIGHTS, FACTOR, PDL,
            )  # fmt: skip
    else:
        length, count = row_of(table, row, T)
        real = t < count
        stores = real
        if WRITE:
            stores = real & keeps_slot(table, length + t, length + count)
        h = (head - Q_HEADS) % K_HEADS
        place = (row * K_HEADS + h) * T + t
        cell = tl.where(real, slot_at(table, length + t), 0)
        if WRITE:
            cell = cell_at(table, row, h, cell, stores, K_HEADS, PAGE)
        if head < Q_HEADS + K_HEADS:
            encode_head(
                k + row * k_row + h * k_head + t * k_token, k_weight, k_eps, k_plus, cos, sin, centre + h * D,
                k_codes, k_scales, k_high, table, place, cell, stores, K_STORE, K_SCALES, K_HIGH,
                D, KEYS, K_HADAMARD, CENTRED, PAIRS, NEIGHBOURS, NORMS, WEIGHTS, WRITE, PDL,
            )  # fmt: skip
        else:
            encode_head(
                v + row * v_row + h * v_head + t * v_token, k_weight, k_eps, k_plus, cos, sin, centre,
                v_codes, v_scales, v_high, table, place, cell, stores, V_STORE, V_SCALES, V_HIGH,
                DV, VALUES, V_HADAMARD, False, 0, False, "", False, WRITE, PDL,
            )  # fmt: skip


def encode(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hk, T, D]
    v: Tensor | None,  # [B, Hk, T, Dv]; None for latents, which are one field
    table: Tensor,  # the row of the cache's table for this entry
    keys: Side,
    values: Side | None = None,
    *,
    write: bool,
    with_queries: bool = True,
    rope: tuple[Tensor, Tensor] | None = None,  # this and the next four as `rotate_and_append` takes them
    neighbours: bool = False,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    norms_last: bool = False,
    factor: Tensor | None = None,
    page: int = 0,  # slots per page; 0 without pages
) -> Coded:
    """Quantizes the new tokens: with `write` the real ones into their slots, else into tensors of this pass.

    A ring whose tokens are read in the same pass takes one token at a time. The last axis of q, k and v is contiguous.
    Queries are prepared where the keys of heads are quantized. Queries of latents, and of plain keys, are returned as
    given, after norm and RoPE. `with_queries` is False where there are none: q is then ignored.
    """
    B, Hq, T, D = q.shape
    Hk = k.shape[1]
    side = values or keys
    field = k if v is None else v
    parts = keys.empty(k, Hk, T)
    more = parts if values is None else values.empty(field, Hk, T)
    ready = values is None or keys.form == "plain" or not with_queries
    q_out, query_terms = q, parts.codes
    if not ready:
        exact = q.dtype == torch.float32
        q_out = torch.empty(B, T, Hq, D, dtype=torch.float32 if exact else torch.float16, device=q.device)
        query_terms = torch.empty(B, T, Hq, 2 + groups_of(D), device=q.device)
    first = Hq if ready else 0
    cos, sin = (q, q) if rope is None else rope
    weights, scalars = norm_arguments(norms, q)
    launch(
        _encode, (B * T, Hq - first + (Hk if v is None else 2 * Hk)),
        q, k, field, cos, sin, *weights, q if factor is None else factor, q_out, query_terms,
        query_terms if keys.centre is None else keys.centre,
        parts.codes, parts.scales, parts.high, more.codes, more.scales, more.high, table,
        *q.stride()[:3], *k.stride()[:3], *field.stride()[:3], *cos.stride()[:2],
        *((0, 0) if factor is None else factor.stride()), *scalars,
        T=T, Q_HEADS=Hq, K_HEADS=Hk, D=D, DV=side.dim, KEYS=keys.form, VALUES=side.form, K_HADAMARD=keys.hadamard,
        V_HADAMARD=side.hadamard, CENTRED=keys.centre is not None, PAIRS=0 if rope is None else cos.shape[-1],
        NEIGHBOURS=neighbours, NORMS="" if norms is None else "last" if norms_last else "first",
        WEIGHTS=norms is not None and norms[0].weight is not None, FACTOR=factor is not None,
        WRITE=write, FIRST=first, PAGE=page, num_warps=1,
    )  # fmt: skip
    return Coded(q if ready else q_out.transpose(1, 2), query_terms, parts, more, keys, side, write)


def encode_queries(
    q: Tensor,  # [B, Hq, T, D]
    like: Coded,
    table: Tensor,  # the row of the cache's table for the entry that is read
    *,
    rope: tuple[Tensor, Tensor] | None = None,  # this and the next four as `rotate_and_append` takes them
    neighbours: bool = False,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    norms_last: bool = False,
    factor: Tensor | None = None,
) -> Coded:
    """`like` with these queries, prepared for its quantized keys: for a layer that quantizes no tokens of its own."""
    B, Hq, T, D = q.shape
    dtype = torch.float32 if q.dtype == torch.float32 else torch.float16
    q_out = torch.empty(B, T, Hq, D, dtype=dtype, device=q.device)
    query_terms = torch.empty(B, T, Hq, 2 + groups_of(D), device=q.device)
    cos, sin = (q, q) if rope is None else rope
    weights, scalars = norm_arguments(norms, q)
    k, v, keys, values = like.k, like.v, like.keys, like.values
    launch(
        _encode, (B * T, Hq),  # no programs for key and value heads
        q, q, q, cos, sin, *weights, q if factor is None else factor, q_out, query_terms,
        query_terms if keys.centre is None else keys.centre,
        k.codes, k.scales, k.high, v.codes, v.scales, v.high, table,
        *q.stride()[:3], 0, 0, 0, 0, 0, 0, *cos.stride()[:2], *((0, 0) if factor is None else factor.stride()),
        *scalars, T=T, Q_HEADS=Hq, K_HEADS=k.codes.shape[1], D=D, DV=values.dim, KEYS=keys.form, VALUES=values.form,
        K_HADAMARD=keys.hadamard, V_HADAMARD=values.hadamard, CENTRED=keys.centre is not None,
        PAIRS=0 if rope is None else cos.shape[-1], NEIGHBOURS=neighbours,
        NORMS="" if norms is None else "last" if norms_last else "first",
        WEIGHTS=norms is not None and norms[0].weight is not None, FACTOR=factor is not None,
        WRITE=False, FIRST=0, PAGE=0, num_warps=1,
    )  # fmt: skip
    return replace(like, q=q_out.transpose(1, 2), query_terms=query_terms)


def append_codes(k: Tensor, v: Tensor, table: Tensor, keys: Side, values: Side, page: int = 0) -> None:
    """Quantizes keys and values [B, H, T, D] into their slots: the first `counts` tokens of each row."""
    encode(k, k, v, table, keys, values, write=True, with_queries=False, page=page)
