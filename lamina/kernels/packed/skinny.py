"""Skinny GEMM over packed weights: a packed matrix times up to 64 vectors on tensor cores.

As `gemm/skinny.py`, with tiles of codes that become tiles of values in registers (`values.py`). 4-bit codes give two
products for a tile: of the lower halves of bytes with values 0 to 15 of each 32 of the vectors, and of the upper halves
with the others. One scale for each row, as fp8 may have, multiplies the sums instead of the values.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.gemm.epilogue import arrive, finish, plus, wanted
from lamina.kernels.launch import begin
from lamina.kernels.packed.values import tile_values


@triton.jit
def load_scales(
    scales, zeros, r, at, K, scale_stride,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, ZEROS: tl.constexpr,
    EVEN: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of rows r [ROWS] for the tile from value `at` on: one for each group, or piece where groups and
    tiles do not divide one another; zero past K."""
    STEP: tl.constexpr = scale_step(BLOCK, SPAN, GROUP)
    j = tl.arange(0, BLOCK // STEP)[None, :]
    value = at + j * STEP
    # In whole groups they are neighbours, which one copy can fetch.
    group = tl.multiple_of(at // GROUP, BLOCK // STEP) + j if STEP == GROUP else value // GROUP
    where = (r // SIDE)[:, None] * scale_stride + group
    if FOURS:  # the four zeros of a row as one word: cp.async copies no less than 4 bytes
        scale = tl.load(scales + where)
        first = ((r // SIDE)[:, None] * scale_stride + at // GROUP) // 4
        words = tl.load(zeros.to(tl.pointer_type(tl.int32), bitcast=True) + first)
        zero = words >> 8 * j & 255
    elif EVEN:
        scale = tl.load(scales + where)
        zero = tl.load(zeros + where) if ZEROS != "" else scale
    else:
        scale = tl.load(scales + where, mask=value < K, other=0)
        zero = tl.load(zeros + where, mask=value < K, other=0) if ZEROS != "" else scale
    return scale, zero


@triton.constexpr_function
def scale_step(block, span, group):
    """Values of a tile that share a scale, as scales are loaded."""
    return min(group, block) if block % group == 0 or group % block == 0 else span


@triton.jit
def each_piece(scale, PIECES: tl.constexpr):
    """[ROWS, groups] -> [ROWS, PIECES]"""
    ROWS: tl.constexpr = scale.shape[0]
    GROUPS: tl.constexpr = scale.shape[1]
    if GROUPS == PIECES:
        return scale
    elif GROUPS == 1:
        return tl.broadcast_to(scale, [ROWS, PIECES])
    else:
        wide = tl.broadcast_to(scale[:, :, None], [ROWS, GROUPS, PIECES // GROUPS])
        return tl.reshape(wide, [ROWS, PIECES])


@triton.jit
def load_tile(codes, r, at, K, PIECES: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr):
    """-> codes [ROWS, PIECES, 16] uint8; zero past K."""
    piece = at // SPAN + tl.arange(0, PIECES)[None, :, None]
    byte = r[:, None, None] * (K // SPAN * 16) + piece * 16 + tl.arange(0, 16)[None, None, :]
    return tl.load(codes + byte, mask=(piece * SPAN < K) | EVEN, other=0, eviction_policy="evict_first")


@triton.jit
def add_products(
    total, lost, low, high, v, v_up, scale, FOUR: tl.constexpr, AFTER: tl.constexpr, APART: tl.constexpr
):  # fmt: skip
    """total + scale · (low v + high v_up), the second if FOUR; scale [ROWS, 1] if AFTER, otherwise in the values.

    low and high are [ROWS, PIECES, 16]. APART: with Kahan's compensation, `lost`."""
    SHAPE: tl.constexpr = [low.shape[0], low.shape[1] * low.shape[2]]
    low = tl.reshape(low, SHAPE)
    if AFTER or APART:
        term = tl.dot(low, v, input_precision="ieee")
        if FOUR:
            term = tl.dot(tl.reshape(high, SHAPE), v_up, term, input_precision="ieee")
        if AFTER:
            term *= scale.to(tl.float32)
        if APART:
            return plus(total, lost, term)
        else:
            return total + term, lost
    else:
        total = tl.dot(low, v, total)
        if FOUR:
            total = tl.dot(tl.reshape(high, SHAPE), v_up, total)
        return total, lost


@triton.jit
def packed_tiles_kernel(
    x,  # [N, K]
    codes,  # uint8 [M, K] or [M, K / 2], 2M rows if GATED: gate rows, then up rows
    scales, zeros,  # [M / SIDE, K / GROUP], 2M if GATED; zeros or offsets of the same shape, read if ZEROS
    bias, factors, residual,  # [M] ([2M] if GATED), [M], [N, M]; read if BIAS, FACTORS, RESIDUAL
    out,  # [N, M]
    parts, arrived,  # [2 or 1, SPLITS, M, N_BLOCK] float32 partial sums, [M / ROWS] int32, zero between launches
    M, K, N, x_stride, scale_stride, residual_stride, out_stride,  # outputs, length of a sum, vectors; strides of rows
    before, scale, softcap,  # factors on x and on the product, bound of the result
    KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SIGNED: tl.constexpr, ZEROS: tl.constexpr,
    SCALED: tl.constexpr,  # whether scales are applied to pieces; otherwise one scale for each row, to its sum
    N_BLOCK: tl.constexpr,  # N padded to a power of two, at least 16
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,  # `Tiles`
    AFTER: tl.constexpr,  # whether the scale of a tile's row multiplies sums over the tile, in float32
    AHEAD: tl.constexpr,  # whether scales are loaded a tile ahead: cp.async copies no less than 4 bytes
    FOURS: tl.constexpr,  # whether a tile has four uint8 zeros for each row, aligned
    APART: tl.constexpr, EVEN: tl.constexpr,  # whether tiles have sums of their own; BLOCK divides K: no masks
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, FACTORS: tl.constexpr, RESIDUAL: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): outputs i · ROWS … + ROWS of all N vectors, summed over the s-th of SPLITS parts of K."""
    FOUR: tl.constexpr = KIND == "int4" or KIND == "mxfp4"
    SPAN: tl.constexpr = 32 if FOUR else 16
    PIECES: tl.constexpr = BLOCK // SPAN
    TYPE: tl.constexpr = x.dtype.element_ty
    begin(PDL)
    group, split = tl.program_id(0), tl.program_id(1)
    m, n = group * ROWS + tl.arange(0, ROWS), tl.arange(0, N_BLOCK)
    share = tl.cdiv(tl.cdiv(K, BLOCK), SPLITS) * BLOCK  # contiguous: tiles stream in order
    start, stop = split * share, tl.minimum((split + 1) * share, K)
    r = tl.minimum(m, M - 1).to(tl.int64)
    j = tl.arange(0, PIECES * 16)
    k = j // 16 * SPAN + j % 16  # values of lower halves; of all bytes, if codes have 8 bits
    k = tl.max_contiguous(tl.multiple_of(k, 16), 16)
    column = x + tl.minimum(n, N - 1)[None, :] * x_stride + k[:, None]  # [PIECES · 16, N_BLOCK]
    a, b = tl.zeros([ROWS, N_BLOCK], tl.float32), tl.zeros([ROWS, N_BLOCK], tl.float32)
    a_lost, b_lost = a, b
    one, zero = tl.full([ROWS, 1], 1.0, tl.float32), tl.full([ROWS, 1], 0.0, tl.float32)
    up_one, up_zero = one, zero
    if SCALED and AHEAD:
        one, zero = load_scales(scales, zeros, r, start, K, scale_stride, BLOCK, SPAN, GROUP, SIDE, ZEROS, EVEN, FOURS)
        up_one, up_zero = one, zero
        if GATED:
            up_one, up_zero = load_scales(scales, zeros, r + M, start, K, scale_stride, BLOCK, SPAN, GROUP, SIDE,
                                          ZEROS, EVEN, FOURS)  # fmt: skip
    for at in tl.range(start, stop, BLOCK, num_stages=STAGES):
        inside = (at + k < K) | EVEN
        now, now_zero, up, up_now_zero = one, zero, up_one, up_zero
        if SCALED and AHEAD:
            later = tl.minimum(at + BLOCK, K - BLOCK) if EVEN else at + BLOCK  # those of the last tile are not used
            one, zero = load_scales(
                scales, zeros, r, later, K, scale_stride, BLOCK, SPAN, GROUP, SIDE, ZEROS, EVEN, FOURS
            )
            if GATED:
                up_one, up_zero = load_scales(scales, zeros, r + M, later, K, scale_stride, BLOCK, SPAN, GROUP,
                                              SIDE, ZEROS, EVEN, FOURS)  # fmt: skip
        elif SCALED:
            now, now_zero = load_scales(
                scales, zeros, r, at, K, scale_stride, BLOCK, SPAN, GROUP, SIDE, ZEROS, EVEN, FOURS
            )
            if GATED:
                up, up_now_zero = load_scales(scales, zeros, r + M, at, K, scale_stride, BLOCK, SPAN, GROUP, SIDE,
                                              ZEROS, EVEN, FOURS)  # fmt: skip
        v = tl.load(column + at, mask=inside[:, None], other=0)
        v_up = v
        if FOUR:
            v_up = tl.load(column + at + 16, mask=inside[:, None], other=0)
        tile = load_tile(codes, r, at, K, PIECES, SPAN, EVEN)
        low, high = tile_values(tile, each_piece(now, PIECES), each_piece(now_zero, PIECES), TYPE, KIND, SIGNED, ZEROS,
                                AFTER)  # fmt: skip
        a, a_lost = add_products(a, a_lost, low, high, v, v_up, now, FOUR, AFTER, APART)
        if GATED:
            tile = load_tile(codes, r + M, at, K, PIECES, SPAN, EVEN)
            low, high = tile_values(tile, each_piece(up, PIECES), each_piece(up_now_zero, PIECES), TYPE, KIND, SIGNED,
                                    ZEROS, AFTER)  # fmt: skip
            b, b_lost = add_products(b, b_lost, low, high, v, v_up, up, FOUR, AFTER, APART)

    if not SCALED:
        a *= tl.load(scales + r * scale_stride)[:, None].to(tl.float32)
        if GATED:
            b *= tl.load(scales + (r + M) * scale_stride)[:, None].to(tl.float32)
    keep = (m < M)[:, None] & (n < N)[None, :]
    at = n[None, :] * residual_stride + m[:, None]
    out += n[None, :] * out_stride + m[:, None]
    if SPLITS > 1:
        here = m[:, None] * N_BLOCK + n[None, :]  # [ROWS, N_BLOCK]
        step = M * N_BLOCK
        inside = (m < M)[:, None]
        tl.store(parts + split * step + here, a, mask=inside)
        if GATED:
            tl.store(parts + (SPLITS + split) * step + here, b, mask=inside)
        if arrive(arrived, group, SPLITS):
            a = tl.zeros([ROWS, N_BLOCK], dtype=tl.float32)
            b = tl.zeros([ROWS, N_BLOCK], dtype=tl.float32)
            for s in tl.static_range(SPLITS):  # written by other programs: past the L1 cache, in a fixed order
                a += tl.load(parts + s * step + here, mask=inside, other=0, cache_modifier=".cg")
                if GATED:
                    b += tl.load(parts + (SPLITS + s) * step + here, mask=inside, other=0, cache_modifier=".cg")
            first, second, factor, rest = wanted(m[:, None], at, keep, M, bias, factors, residual,
                                                 GATED, BIAS, FACTORS, RESIDUAL)  # fmt: skip
            finish(a, b, first, second, factor, rest, before, scale, softcap, out, keep, GATED, ACT, SOFTCAP)
    else:
        first, second, factor, rest = wanted(m[:, None], at, keep, M, bias, factors, residual,
                                             GATED, BIAS, FACTORS, RESIDUAL)  # fmt: skip
        finish(a, b, first, second, factor, rest, before, scale, softcap, out, keep, GATED, ACT, SOFTCAP)
