"""New tokens into codes, and queries made ready for codes: one launch in front of attention over codes.

A program takes one head of one token. A query or a key head is normed and rotated as in `rope`, unless that is done. A
key or a value head is centred, turned and encoded as `lamina.cache.codec.formats` does it; its parts go to its slot,
from which attention reads the new tokens too: they are seen as they are kept. A query head is turned as the keys are.
In 16 bits it is divided by its largest number, so that float16 holds it whatever its size. Beside it go (`marks`) that
number, its product with the keys' centre, and its sum over each group, which the groups' offsets are multiplied by.

Padding is not stored. Without `write` nothing is: several tokens at once go into a ring only when they are accepted.
Then the parts go to a small store of this pass alone.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.cache.codec.formats import FieldFormat
from lamina.cache.codec.registry import FormatName
from lamina.errors import InputError
from lamina.kernels.attention.rope_append import cell_at, rotated, slot_at, stays, weights_of
from lamina.kernels.eligibility import why_no_format
from lamina.kernels.entry import K_HIGH, K_SCALES, K_STORE, V_HIGH, V_SCALES, V_STORE, row_of
from lamina.kernels.launch import begin, launch
from lamina.kernels.quant.layout import (
    GROUP,
    code_bytes,
    groups_of,
    high_bytes,
    number_at,
    padded_groups,
    scale_numbers,
    turned,
)

if TYPE_CHECKING:
    from lamina.nn.norm import RMSNorm

SMALLEST = tl.constexpr(2.0**-24)  # of the numbers above 0 that float16 has
HALFWAY = tl.constexpr(1.5 * 2**23)  # added and taken off, it rounds to the nearest whole number, halves to even ones


@dataclass(frozen=True)
class Side:
    """How the numbers of one field are written, as kernels need to know it."""

    form: FormatName
    dim: int
    turned: bool = False
    centre: Tensor | None = None  # [H, D] float32

    @classmethod
    def of(cls, chosen: FieldFormat | None, dim: int) -> Side:
        if chosen is None:
            return cls("plain", dim)
        if (reason := why_no_format(chosen)) or chosen.kernel_layout is None:
            raise InputError(reason)
        mean = None if chosen.key_mean is None else chosen.key_mean.float().reshape(-1, dim).contiguous()
        return cls(chosen.kernel_layout, dim, chosen.rotation is not None, mean)

    def new(self, like: Tensor, heads: int, tokens: int) -> Parts:
        """Room for the parts of new tokens, as in a store with a slot for each."""
        lead = like.shape[0], heads, tokens

        def room(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*lead, max(width, 1), dtype=dtype, device=like.device)

        if self.form == "plain":
            codes = room(self.dim, like.dtype)
            return Parts(codes, codes, codes)
        codes, high = room(code_bytes(self.dim, self.form), torch.uint8), high_bytes(self.dim, self.form)
        scales = room(scale_numbers(self.dim, self.form), torch.float16)
        return Parts(codes, scales, room(high, torch.uint8) if high else codes)


@dataclass(frozen=True)
class Parts:
    """The parts of the new tokens of one field, [B, H, T, width] each."""

    codes: Tensor
    scales: Tensor
    high: Tensor


@dataclass(frozen=True)
class Coded:
    """What attention over codes takes of a pass: queries made ready, and the new tokens in their parts."""

    q: Tensor  # [B, Hq, T, D]
    marks: Tensor  # [B, T, Hq, 2 + groups] float32: the largest number, the centre's product, sums over groups
    k: Parts
    v: Parts
    keys: Side
    values: Side
    stored: bool  # whether the parts are in their slots; else they are in k and v


@triton.jit
def half(x):
    """Rounded to what float16 has."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.float32)


@triton.jit
def half_above(x):
    """A number that float16 has and that is no less than x >= 0."""
    return half(x * (1 + 2.0**-10) + SMALLEST / 2)


@triton.jit
def inverse(scale):
    return tl.where(scale > 0, tl.math.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def to_float8(x):
    """The code of the float8 e4m3 nearest to x, |x| <= 448."""
    size = tl.abs(x)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    step = ((127 + 3 - exponent) << 23).to(tl.float32, bitcast=True)  # one over a step of the mantissa
    steps = (size * step + HALFWAY) - HALFWAY
    return tl.where(x < 0, 128, 0) + (exponent + 6) * 8 + steps.to(tl.int32)


@triton.jit
def in_groups(centre, D: tl.constexpr, FORM: tl.constexpr, CENTRED: tl.constexpr):
    """A head's numbers as rows of groups: the groups, which number is where, whether there is one, and its centre."""
    G: tl.constexpr = padded_groups(D)
    group, e = tl.arange(0, G)[:, None], tl.arange(0, GROUP)[None, :]
    d, there = number_at(group * GROUP + e, D, FORM)
    middle = tl.zeros([G, GROUP], tl.float32)
    if CENTRED:
        middle = tl.load(centre + d, mask=there, other=0.0)
    return group, d, there, middle


@triton.jit
def head_at(
    x, d, there, weight, eps, plus, factor, cos, sin,
    D: tl.constexpr, PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """The numbers d [groups, 32] of the head at x, normed, rotated and times a factor, as a tensor would hold them."""
    if PAIRS == 0 and NORMS == "":
        numbers = tl.load(x + d, mask=there, other=0.0).to(tl.float32)
    else:
        N: tl.constexpr = d.shape[0] * d.shape[1]
        one = tl.zeros([1, 1], tl.int32)
        place = tl.reshape(tl.where(there, d, D), [N])
        numbers = rotated(x + one, one == 0, weight, eps, plus, cos, sin, place, D, PAIRS, NEIGHBOURS, NORMS, WEIGHTS)
        numbers = tl.reshape(numbers, d.shape)
    return (numbers * factor).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def keep(
    x, weight, eps, plus, cos, sin, centre, codes, scales, high, table, place, cell, stores,
    CODES: tl.constexpr, SCALES: tl.constexpr, HIGH: tl.constexpr,
    D: tl.constexpr, FORM: tl.constexpr, TURNED: tl.constexpr, CENTRED: tl.constexpr,
    PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr, WRITE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The head at x, encoded, in its slot's `cell` where it `stores`, or else at `place` of this pass's parts.

    centre: that of the head
    """
    G: tl.constexpr = padded_groups(D)
    CODE_BYTES: tl.constexpr = code_bytes(D, FORM)
    SCALE_NUMBERS: tl.constexpr = scale_numbers(D, FORM)
    HIGH_BYTES: tl.constexpr = high_bytes(D, FORM)
    if WRITE:
        place = cell
        codes = tl.load(table + CODES).to(codes.dtype)
        scales = tl.load(table + SCALES).to(scales.dtype)
        high = tl.load(table + HIGH).to(high.dtype)
    codes += place * CODE_BYTES
    scales += place * SCALE_NUMBERS
    high += place * HIGH_BYTES
    group, d, there, middle = in_groups(centre, D, FORM, CENTRED)
    begin(PDL)
    numbers = head_at(x, d, there, weight, eps, plus, 1.0, cos, sin, D, PAIRS, NEIGHBOURS, NORMS, WEIGHTS)
    if FORM == "plain":
        tl.store(codes + d, numbers.to(codes.dtype.element_ty), mask=there & stores)
    else:
        numbers -= middle
        if FORM == "fp8":
            scale = half_above(tl.math.div_rn(tl.max(tl.abs(numbers)), 448.0))
            close = tl.minimum(tl.maximum(numbers * inverse(scale), -448.0), 448.0)
            tl.store(codes + d, to_float8(close).to(tl.uint8), mask=there & stores)
            tl.store(scales, scale.to(tl.float16), mask=stores)
        else:
            MOST: tl.constexpr = 2**FORM - 1
            if TURNED:
                whole = (group + 1) * GROUP <= D
                numbers = tl.where(whole, turned(numbers, G), numbers)
            real = group * GROUP < D
            least = tl.min(tl.where(there, numbers, tl.where(real, float("inf"), 0.0)), axis=1, keep_dims=True)
            most = tl.max(tl.where(there, numbers, tl.where(real, float("-inf"), 0.0)), axis=1, keep_dims=True)
            # Offsets are rounded down and scales up, so that nothing falls off either end.
            offset = half(least - tl.abs(least) * 2.0**-10)
            scale = half_above(tl.math.div_rn(most - offset, MOST * 1.0))
            close = (numbers - offset) * inverse(scale) + HALFWAY - HALFWAY
            code = tl.minimum(tl.maximum(close, 0.0), MOST * 1.0).to(tl.int32)
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
                bytes = (size + 7) // 8
                n = d % GROUP
                for plane in tl.static_range(FORM - 4):
                    flags = (code >> 4 + plane & 1) << n % 8
                    for m in tl.static_range(4):
                        byte = tl.sum(tl.where(n // 8 == m, flags, 0), axis=1, keep_dims=True)
                        at = group * (4 * (FORM - 4)) + plane * bytes + m
                        tl.store(high + at, byte.to(tl.uint8), mask=(m < bytes) & stores)


@triton.jit
def ask(
    x, weight, eps, plus, factor, cos, sin, y, marks, centre,
    D: tl.constexpr, FORM: tl.constexpr, TURNED: tl.constexpr, CENTRED: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The query head at x, made ready, at y and marks."""
    G: tl.constexpr = padded_groups(D)
    group, d, there, middle = in_groups(centre, D, FORM, CENTRED)
    begin(PDL)
    by = 1.0
    if FACTOR:
        by = tl.load(factor)
    numbers = head_at(x, d, there, weight, eps, plus, by, cos, sin, D, PAIRS, NEIGHBOURS, NORMS, WEIGHTS)
    product = tl.sum(numbers * middle)
    if TURNED:
        numbers = tl.where((group + 1) * GROUP <= D, turned(numbers, G), numbers)
    largest = 1.0
    if y.dtype.element_ty == tl.float16:
        largest = tl.max(tl.abs(numbers))
        numbers = numbers * inverse(largest)
    numbers = numbers.to(y.dtype.element_ty)
    tl.store(y + d, numbers, mask=there)
    tl.store(marks, largest)
    tl.store(marks + 1, product)
    tl.store(marks + 2 + group, tl.sum(numbers.to(tl.float32), axis=1, keep_dims=True), mask=group * GROUP < D)


@triton.jit
def _encode(
    q, k, v, cos, sin, q_weight, k_weight, factor, q_out, marks, centre,
    k_codes, k_scales, k_high, v_codes, v_scales, v_high, table,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, rope_row, rope_token, factor_row,
    factor_token, q_eps, k_eps, q_plus, k_plus,
    T: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, K_TURNED: tl.constexpr, V_TURNED: tl.constexpr, CENTRED: tl.constexpr,
    PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr, NORMS: tl.constexpr, WEIGHTS: tl.constexpr, FACTOR: tl.constexpr,
    WRITE: tl.constexpr, FIRST: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (token, head): heads of queries, then of keys, then of values."""
    row, t, head = tl.program_id(0) // T, tl.program_id(0) % T, tl.program_id(1) + FIRST
    cos += row * rope_row + t * rope_token
    sin += row * rope_row + t * rope_token
    if head < Q_HEADS:
        if FIRST == 0:
            mine = (row * T + t) * Q_HEADS + head
            ask(
                q + row * q_row + head * q_head + t * q_token, q_weight, q_eps, q_plus,
                factor + row * factor_row + t * factor_token, cos, sin, q_out + mine * D,
                marks + mine * (2 + groups_of(D)), centre + head // (Q_HEADS // K_HEADS) * D,
                D, KEYS, K_TURNED, CENTRED, PAIRS, NEIGHBOURS, NORMS, WEIGHTS, FACTOR, PDL,
            )  # fmt: skip
    else:
        length, count = row_of(table, row, T)
        real = t < count
        stores = real
        if WRITE:
            stores = real & stays(table, length + t, length + count)
        h = (head - Q_HEADS) % K_HEADS
        place = (row * K_HEADS + h) * T + t
        cell = tl.where(real, slot_at(table, length + t), 0)
        if WRITE:
            cell = cell_at(table, row, h, cell, stores, K_HEADS, PAGE)
        if head < Q_HEADS + K_HEADS:
            keep(
                k + row * k_row + h * k_head + t * k_token, k_weight, k_eps, k_plus, cos, sin, centre + h * D,
                k_codes, k_scales, k_high, table, place, cell, stores, K_STORE, K_SCALES, K_HIGH,
                D, KEYS, K_TURNED, CENTRED, PAIRS, NEIGHBOURS, NORMS, WEIGHTS, WRITE, PDL,
            )  # fmt: skip
        else:
            keep(
                v + row * v_row + h * v_head + t * v_token, k_weight, k_eps, k_plus, cos, sin, centre,
                v_codes, v_scales, v_high, table, place, cell, stores, V_STORE, V_SCALES, V_HIGH,
                DV, VALUES, V_TURNED, False, 0, False, "", False, WRITE, PDL,
            )  # fmt: skip


def encode(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hk, T, D]
    v: Tensor | None,  # [B, Hk, T, Dv]; None for latents, which are all there is
    table: Tensor,  # the row of the cache's table for this entry
    keys: Side,
    values: Side | None = None,
    *,
    write: bool,
    asks: bool = True,
    rope: tuple[Tensor, Tensor] | None = None,  # as `rotate_and_append` takes them, up to `factor`
    neighbours: bool = False,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    norms_last: bool = False,
    factor: Tensor | None = None,
    page: int = 0,  # slots of a page, where the store is in pages
) -> Coded:
    """The new tokens in codes: with `write` the real ones in their slots, else in parts of this pass.

    A ring that tokens are read from after writing takes one at a time. The last axis of q, k and v is contiguous.
    Queries are made ready only where keys are codes of heads: those of latents, and of keys that are plain, are what
    they are, and come normed and rotated. `asks`: whether there are any.
    """
    B, Hq, T, D = q.shape
    Hk = k.shape[1]
    side = values or keys
    field = k if v is None else v
    parts = keys.new(k, Hk, T)
    more = parts if values is None else values.new(field, Hk, T)
    ready = values is None or keys.form == "plain" or not asks
    q_out, marks = q, parts.codes
    if not ready:
        exact = q.dtype == torch.float32
        q_out = torch.empty(B, T, Hq, D, dtype=torch.float32 if exact else torch.float16, device=q.device)
        marks = torch.empty(B, T, Hq, 2 + groups_of(D), device=q.device)
    first = Hq if ready else 0
    cos, sin = (q, q) if rope is None else rope
    weights, numbers = weights_of(norms, q)
    launch(
        _encode, (B * T, Hq - first + (Hk if v is None else 2 * Hk)),
        q, k, field, cos, sin, *weights, q if factor is None else factor, q_out, marks,
        marks if keys.centre is None else keys.centre,
        parts.codes, parts.scales, parts.high, more.codes, more.scales, more.high, table,
        *q.stride()[:3], *k.stride()[:3], *field.stride()[:3], *cos.stride()[:2],
        *((0, 0) if factor is None else factor.stride()), *numbers,
        T=T, Q_HEADS=Hq, K_HEADS=Hk, D=D, DV=side.dim, KEYS=keys.form, VALUES=side.form, K_TURNED=keys.turned,
        V_TURNED=side.turned, CENTRED=keys.centre is not None, PAIRS=0 if rope is None else cos.shape[-1],
        NEIGHBOURS=neighbours, NORMS="" if norms is None else "last" if norms_last else "first",
        WEIGHTS=norms is not None and norms[0].weight is not None, FACTOR=factor is not None,
        WRITE=write, FIRST=first, PAGE=page, num_warps=1,
    )  # fmt: skip
    return Coded(q if ready else q_out.transpose(1, 2), marks, parts, more, keys, side, write)


def append_codes(k: Tensor, v: Tensor, table: Tensor, keys: Side, values: Side, page: int = 0) -> None:
    """Keys and values [B, H, T, D] into their slots, in codes: the first `counts` tokens of each row."""
    encode(k, k, v, table, keys, values, write=True, asks=False, page=page)
