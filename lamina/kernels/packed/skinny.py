"""Skinny GEMM over packed weights: a packed matrix times up to 64 vectors on tensor cores.

The weight is the first operand, so each code becomes a value in the registers of the one warp that multiplies it
(`values.py`), and outputs are divided among the warps of a program. One scale for each row, as fp8 may have, multiplies
the sums instead of the values. Scales are loaded a tile ahead, since they are too few bytes for asynchronous copies.
Gate rows and up rows are one tile, so their values share all that is done for a tile.

The values of 4-bit codes are put in the order of K in registers, so one load brings the vectors of a tile, contiguous
along K. All programs read all vectors, from L2, which takes more time than anything else here: two loads of every other
16 values, one for each half of the bytes, made it slower.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.gemm.ends import end_tile
from lamina.kernels.gemm.epilogue import plus
from lamina.kernels.launch import begin, prefetch_lines
from lamina.kernels.packed.values import LOWERED, by_words, code_scales, code_values

AHEAD = tl.constexpr(4)  # lines of 128 bytes of each row that are prefetched while the kernel in front still runs


@triton.jit
def load_scales(
    scales, zeros, r, at, K, scale_stride,
    BLOCK: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, ZEROS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of rows r [ROWS] for the tile from value `at` on, [ROWS, BLOCK / STEP] each; zero past K."""
    j = tl.arange(0, BLOCK // STEP)[None, :]
    value = at + j * STEP
    # Whole groups are neighbours, which one load can read.
    group = tl.multiple_of(at // GROUP, BLOCK // STEP) + j if STEP == GROUP else value // GROUP
    where = (r // SIDE)[:, None] * scale_stride + group
    if EVEN:
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
def each_byte(x, BYTES: tl.constexpr):
    """[ROWS, groups] -> [ROWS, BYTES]"""
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1]
    if GROUPS == 1:
        return tl.broadcast_to(x, [ROWS, BYTES])
    else:
        wide = tl.broadcast_to(x[:, :, None], [ROWS, GROUPS, BYTES // GROUPS])
        return tl.reshape(wide, [ROWS, BYTES])


@triton.jit
def load_codes(pointer, inside, EVEN: tl.constexpr):
    """-> codes [ROWS, BYTES] uint8; zero past K."""
    if EVEN:
        return tl.load(pointer, eviction_policy="evict_first")
    else:
        return tl.load(pointer, mask=inside[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def tile_product(
    total, lost, tile, scale, zero, v, KIND: tl.constexpr, SIGNED: tl.constexpr, ZEROS: tl.constexpr,
    SCALED: tl.constexpr, EXACT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """total [ROWS, N] plus the product of a tile of codes [ROWS, BYTES] with v [BLOCK, N]; scale and zero are
    [ROWS, groups]."""
    ROWS: tl.constexpr = tile.shape[0]
    BYTES: tl.constexpr = tile.shape[1]
    factor, more = code_scales(scale, zero, v.dtype, KIND, SIGNED, ZEROS)
    factor, more = each_byte(factor, BYTES), each_byte(more, BYTES)
    values = code_values(tile, factor, more, False, SCALED, v.dtype, KIND, SIGNED, ZEROS)
    if KIND == "int4" or KIND == "mxfp4":  # upper halves of 16 bytes come behind the lower: registers, not a move
        high = code_values(tile, factor, more, True, SCALED, v.dtype, KIND, SIGNED, ZEROS)
        low, high = tl.reshape(values, [ROWS, BYTES // 16, 16]), tl.reshape(high, [ROWS, BYTES // 16, 16])
        values = tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), [ROWS, 2 * BYTES])
    if EXACT:
        return plus(total, lost, tl.dot(values, v, input_precision="ieee"))
    elif APART:
        return tl.fma(tl.dot(values, v), 1.0, total), lost  # a sum would become the other form
    else:
        return tl.dot(values, v, total), lost


@triton.jit
def packed_tiles_kernel(
    x,  # [N, K]
    codes,  # uint8 [M, K] or [M, K / 2], 2M rows if GATED: gate rows, then up rows
    code_tiles,  # descriptor of the tiles [2 or 1, ROWS, BYTES] of codes, read if BULK
    scales, zeros,  # [M / SIDE, K / GROUP], 2M if GATED; zeros or offsets of the same shape, read if ZEROS
    bias, factors, residual,  # [M] ([2M] if GATED), [M], [N, M]; read if BIAS, FACTORS, RESIDUAL
    out,  # [N, M]
    parts, arrived,  # [2 or 1, SPLITS, M, N_BLOCK] float32 partial sums, [M / ROWS] int32, zero between launches
    M, K, N, x_stride, scale_stride, residual_stride, out_stride,  # outputs, length of a sum, vectors; strides of rows
    before, scale, softcap,  # factors on x and on the product, bound of the result
    KIND: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SIGNED: tl.constexpr, ZEROS: tl.constexpr,
    SCALED: tl.constexpr,  # whether scales are applied to values; otherwise one scale for each row, to its sum
    N_BLOCK: tl.constexpr,  # N padded to a power of two, at least 16
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,  # `Tiles`
    APART: tl.constexpr, BULK: tl.constexpr,  # `Tiles`
    EXACT: tl.constexpr, EVEN: tl.constexpr,  # sums without rounding errors, for float32; BLOCK divides K: no masks
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, FACTORS: tl.constexpr, RESIDUAL: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): outputs i · ROWS … + ROWS of all N vectors, summed over the s-th of SPLITS parts of K."""
    FOUR: tl.constexpr = KIND == "int4" or KIND == "mxfp4"
    SPAN: tl.constexpr = 32 if FOUR else 16
    STEP: tl.constexpr = scale_step(BLOCK, SPAN, GROUP)
    BYTES: tl.constexpr = BLOCK // SPAN * 16
    EACH: tl.constexpr = 2 * ROWS if GATED else ROWS
    group, split = tl.program_id(0), tl.program_id(1)
    m, n = group * ROWS + tl.arange(0, ROWS), tl.arange(0, N_BLOCK)
    share = tl.cdiv(tl.cdiv(K, BLOCK), SPLITS) * BLOCK  # contiguous: tiles stream in order
    start, stop = split * share, tl.minimum((split + 1) * share, K)
    i, byte, k = tl.arange(0, EACH), tl.arange(0, BYTES), tl.arange(0, BLOCK)
    r = tl.minimum(group * ROWS + i % ROWS, M - 1).to(tl.int64) + i // ROWS * M  # rows of codes: gate, then up
    row = codes + r[:, None] * (K // SPAN * 16)
    code = row + byte[None, :]  # [EACH, BYTES]
    column = x + tl.minimum(n, N - 1)[None, :] * x_stride + k[:, None]  # [BLOCK, N_BLOCK]
    # Zeros that ptxas does not recognize, each by itself: it would set registers of them among the products, and then
    # make each wgmma instruction wait for the one before.
    total = (i * 0.0 * before)[:, None] * (n + 1.0)[None, :]
    lost = total
    one, zero = tl.full([EACH, 1], 1.0, tl.float32), tl.full([EACH, 1], 0.0, tl.float32)
    if SCALED:
        at = tl.minimum(start, K - BLOCK) if EVEN else start  # a split may have no tiles
        one, zero = load_scales(scales, zeros, r, at, K, scale_stride, BLOCK, STEP, GROUP, SIDE, ZEROS, EVEN)
    if PDL:  # no launch of this pass writes codes
        line = start // SPAN * 16 + tl.arange(0, AHEAD) * 128
        prefetch_lines(row + tl.minimum(line, K // SPAN * 16 - 16)[None, :])
    begin(PDL)
    for at in tl.range(start, stop, BLOCK, num_stages=STAGES):
        v = tl.load(column + at) if EVEN else tl.load(column + at, mask=(at + k < K)[:, None], other=0)
        byte_at = at // SPAN * 16
        if BULK:
            tile = tl.reshape(code_tiles.load([0, group * ROWS, byte_at]), [EACH, BYTES])
        else:
            tile = load_codes(code + byte_at, at + byte // 16 * SPAN < K, EVEN)
        now, now_zero = one, zero
        if SCALED:
            later = tl.minimum(at + BLOCK, K - BLOCK) if EVEN else at + BLOCK  # those behind the last are not used
            one, zero = load_scales(scales, zeros, r, later, K, scale_stride, BLOCK, STEP, GROUP, SIDE, ZEROS, EVEN)
        total, lost = tile_product(total, lost, tile, now, now_zero, v, KIND, SIGNED, ZEROS, SCALED, EXACT, APART)

    if not SCALED:
        total *= tl.load(scales + r * scale_stride)[:, None].to(tl.float32)
    elif by_words(x.dtype.element_ty, KIND, SIGNED):
        total *= 1 / LOWERED
    a, b = total, total
    if GATED:
        a, b = tl.split(tl.permute(tl.reshape(total, [2, ROWS, N_BLOCK]), (1, 2, 0)))
    end_tile(a, b, (bias, factors, residual), (before, scale, softcap), out, m, n, M, N, residual_stride, out_stride,
             parts, arrived, group, split, N_BLOCK, SPLITS, GATED, ACT, BIAS, FACTORS, RESIDUAL, SOFTCAP)  # fmt: skip
