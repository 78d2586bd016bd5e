"""GEMV over packed weights: a packed matrix times one vector, bound by the bandwidth of reading the codes.

A program computes ROWS outputs. Its threads own pieces of 16 bytes of codes, the same pieces in all of its rows, so the
vector is prepared once for all rows (`words.py`). A piece's sum is multiplied by its scale; zeros and offsets multiply
the sum of the vector over the piece. Everything around the product is that of `gemm/gemv.py`: split-K, blocks that are
loaded before the kernel in front has finished, deferred norms, the epilogue.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.gemm.deferred_norm import partial_squares
from lamina.kernels.gemm.ends import end_rows
from lamina.kernels.gemm.epilogue import wanted
from lamina.kernels.launch import begin
from lamina.kernels.packed.words import columns_of_four, fp8_floats, integer_sums, vector_pieces


@triton.jit
def load_part(pointer, there, WHOLE: tl.constexpr):
    """Codes, scales, zeros or offsets, which are read once; zero where not there, unless WHOLE: all of them are."""
    if WHOLE:
        return tl.load(pointer, eviction_policy="evict_first")
    else:
        return tl.load(pointer, mask=there, other=0, eviction_policy="evict_first")


@triton.jit
def doubled_e8m0(exponent):
    """2^(exponent - 128) in float32: e8m0 scales, for codes that are doubled."""
    return tl.exp2(exponent.to(tl.float32) - 128)


@triton.jit
def load_row(
    codes, scales, zeros, r, start, K, code_stride, scale_stride,
    PIECES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SCALED: tl.constexpr,
    ZEROS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A block of K of row r -> codes [PIECES · 4] int32, scales [PIECES], zeros or offsets [PIECES]."""
    piece = start // SPAN + tl.arange(0, PIECES)
    word = start // SPAN * 4 + tl.arange(0, PIECES * 4)
    words = load_part(codes + r * code_stride + word, word // 4 * SPAN < K, WHOLE)
    scale, zero = words, words
    if SCALED:
        at = r // SIDE * scale_stride + piece * SPAN // GROUP
        scale = load_part(scales + at, piece * SPAN < K, WHOLE)
        if ZEROS != "":
            zero = load_part(zeros + at, piece * SPAN < K, WHOLE)
    return words, scale, zero


@triton.jit
def load_rows(
    codes, scales, zeros, first, last, start, K, code_stride, scale_stride,
    ROWS: tl.constexpr, PIECES: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`load_row` of each of the rows first, first + 1 …, none after `last`. A function for one row is built once, which
    saves most of the time of building a kernel."""
    found = ()
    for i in tl.static_range(ROWS):
        r = tl.minimum(first + i, last).to(tl.int64)
        found += (load_row(codes, scales, zeros, r, start, K, code_stride, scale_stride, PIECES, SPAN, GROUP, SIDE,
                           SCALED, ZEROS, WHOLE),)  # fmt: skip
    return found


@triton.jit
def row_plus(
    acc, words, scale, zero, x, steps, sums, PIECES: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """acc, float32 [PIECES], plus a row of `load_row` times x of `vector_pieces`."""
    four = columns_of_four(tl.reshape(words, [PIECES, 4]), PIECES)
    if KIND == "fp8":
        term = tl.zeros([PIECES], tl.float32) if SCALED else acc
        for q in tl.static_range(4):
            floats = fp8_floats(four[q], NATIVE)
            for j in tl.static_range(4):
                term += floats[j] * x[4 * q + j]
        return acc + term * scale.to(tl.float32) if SCALED else term
    else:
        total = integer_sums(four, x, KIND, SIGNED)
        if ZEROS == "integer":
            total -= zero.to(tl.int32) * sums
        elif ZEROS == "" and KIND == "int4":
            total -= 8 * sums
        factor = doubled_e8m0(scale) if KIND == "mxfp4" else scale.to(tl.float32)
        term = total.to(tl.float32) * factor
        if ZEROS == "offset":
            term += zero.to(tl.float32) * sums.to(tl.float32)
        return acc + term * steps


@triton.jit
def multiplied(
    accs, rows, x, steps, sums, ROWS: tl.constexpr, PIECES: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """accs, float32 [PIECES] for each row, plus the rows of `load_rows` times x of `vector_pieces`."""
    found = ()
    for i in tl.static_range(ROWS):
        words, scale, zero = rows[i]
        found += (row_plus(accs[i], words, scale, zero, x, steps, sums, PIECES, KIND, SIGNED, ZEROS, SCALED, NATIVE),)
    return found


@triton.jit
def add_block(
    a, b, x, codes, scales, zeros, first, last, apart, start, K, code_stride, scale_stride,
    KIND: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SIGNED: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr,
    WHOLE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The sums a, float32 [PIECES] for each of the rows first, first + 1 …, none after `last`, plus the block of K from
    `start` on times x; the same for b and the rows `apart` further on, if GATED."""
    rows = load_rows(codes, scales, zeros, first, last, start, K, code_stride, scale_stride, ROWS, PIECES, SPAN, GROUP,
                     SIDE, SCALED, ZEROS, WHOLE)  # fmt: skip
    if GATED:
        ups = load_rows(codes, scales, zeros, first + apart, last + apart, start, K, code_stride, scale_stride, ROWS,
                        PIECES, SPAN, GROUP, SIDE, SCALED, ZEROS, WHOLE)  # fmt: skip
    v, steps, sums = vector_pieces(x, start, K, KIND, PIECES, SPAN, WHOLE)
    a = multiplied(a, rows, v, steps, sums, ROWS, PIECES, KIND, SIGNED, ZEROS, SCALED, NATIVE)
    if GATED:
        b = multiplied(b, ups, v, steps, sums, ROWS, PIECES, KIND, SIGNED, ZEROS, SCALED, NATIVE)
    return a, b


@triton.jit
def beside(x, y):
    """x and y [PIECES, N] -> [PIECES, 2N], those of x first."""
    return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def row_sums(accs, ROWS: tl.constexpr):
    """The sum of each row, [ROWS], in one reduction. ROWS is 1, 2, 4, 8 or 16."""
    if ROWS == 1:
        return tl.sum(accs[0][:, None], 0)
    else:
        both = tl.join(accs[0], accs[1])
        if ROWS > 2:
            both = beside(both, tl.join(accs[2], accs[3]))
        if ROWS > 4:
            both = beside(both, beside(tl.join(accs[4], accs[5]), tl.join(accs[6], accs[7])))
        if ROWS > 8:
            third = beside(tl.join(accs[8], accs[9]), tl.join(accs[10], accs[11]))
            both = beside(both, beside(third, beside(tl.join(accs[12], accs[13]), tl.join(accs[14], accs[15]))))
        return tl.sum(both, 0)


@triton.jit
def packed_rows_kernel(
    x,  # [K]
    codes,  # [M, K / 4 or K / 8] int32 words of codes, [2M, …] if GATED: gate rows, then up rows
    scales, zeros,  # [M / SIDE, K / GROUP], 2M if GATED; zeros or offsets of the same shape, read if ZEROS
    bias, factors, residual,  # [M] ([2M] if GATED), [M], [M]; read if BIAS, FACTORS, RESIDUAL
    out,  # [M]
    parts, arrived,  # [2 or 1, SPLITS, M] float32 partial sums, [M / ROWS] int32 counters, zero between launches
    squares,  # [SQUARES] of the deferred norm in front, float32 or int64
    next_weight, next_out, next_squares, next_plus,  # the norm behind: [M], [M], [LANES, 4] int64, 0.0 or 1.0
    M, K, code_stride, scale_stride,  # outputs, length of a sum, words and scales between rows
    before, scale, softcap, eps,  # factors on x and on the product, bound of the result, eps of the norm in front
    KIND: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SIGNED: tl.constexpr,
    ZEROS: tl.constexpr,  # "", "integer", "offset"
    SCALED: tl.constexpr,  # whether scales are applied to pieces; otherwise one scale for each row, to its sum
    NATIVE: tl.constexpr,  # whether the device converts fp8
    SQUARES: tl.constexpr, NEXT_NORM: tl.constexpr,  # 0: x is divided already; whether a norm behind is prepared
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HELD: tl.constexpr, UNROLL: tl.constexpr,
    REST: tl.constexpr, EVEN: tl.constexpr,  # whether blocks are left after HELD; BLOCK divides K: no masks
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, FACTORS: tl.constexpr, RESIDUAL: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): outputs i · ROWS … + ROWS, summed over the blocks s, s + SPLITS, s + 2 · SPLITS … of K."""
    PIECES: tl.constexpr = BLOCK // SPAN
    group, split = tl.program_id(0), tl.program_id(1)
    m = group * ROWS + tl.arange(0, ROWS)
    keep = m < M
    r = tl.minimum(m, M - 1).to(tl.int64)
    r_up = r + M
    first_row, last = group * ROWS, M - 1
    held, partners = (), ()
    for i in tl.static_range(HELD):
        start = (split + i * SPLITS) * BLOCK
        held += (load_rows(codes, scales, zeros, first_row, last, start, K, code_stride, scale_stride, ROWS, PIECES,
                           SPAN, GROUP, SIDE, SCALED, ZEROS, EVEN or i < HELD - 1),)  # fmt: skip
        if GATED:
            partners += (load_rows(codes, scales, zeros, first_row + M, last + M, start, K, code_stride, scale_stride,
                                   ROWS, PIECES, SPAN, GROUP, SIDE, SCALED, ZEROS, EVEN or i < HELD - 1),)  # fmt: skip
    of_row, of_partner = 1.0, 1.0
    if not SCALED:
        of_row = tl.load(scales + r * scale_stride).to(tl.float32)
        if GATED:
            of_partner = tl.load(scales + r_up * scale_stride).to(tl.float32)
    next_factor = 1.0
    if NEXT_NORM:
        next_factor = tl.load(next_weight + m, mask=keep, other=0).to(tl.float32) + next_plus
    begin(PDL)
    loaded = wanted(m, m, keep, M, bias, factors, residual, GATED, BIAS, FACTORS, RESIDUAL)
    if SQUARES:
        squared = partial_squares(squares, SQUARES)

    a = ()
    for _ in tl.static_range(ROWS):
        a += (tl.zeros([PIECES], tl.float32),)
    b = a
    for i in tl.static_range(HELD):
        v, steps, sums = vector_pieces(x, (split + i * SPLITS) * BLOCK, K, KIND, PIECES, SPAN, EVEN or i < HELD - 1)
        a = multiplied(a, held[i], v, steps, sums, ROWS, PIECES, KIND, SIGNED, ZEROS, SCALED, NATIVE)
        if GATED:
            b = multiplied(b, partners[i], v, steps, sums, ROWS, PIECES, KIND, SIGNED, ZEROS, SCALED, NATIVE)
    if REST:
        for start in tl.range((split + HELD * SPLITS) * BLOCK, K, SPLITS * BLOCK, loop_unroll_factor=UNROLL):
            a, b = add_block(a, b, x, codes, scales, zeros, first_row, last, M, start, K, code_stride, scale_stride,
                             KIND, SPAN, GROUP, SIDE, SIGNED, ZEROS, SCALED, NATIVE, ROWS, PIECES, EVEN,
                             GATED)  # fmt: skip

    y = row_sums(a, ROWS) * of_row
    z = y
    if GATED:
        z = row_sums(b, ROWS) * of_partner
    if SQUARES:
        before *= tl.rsqrt(tl.sum(squared, 0) / K + eps)
    end_rows(y, z, loaded, (before, scale, softcap), out, m, keep, M, parts, arrived, group, split,
             (next_factor, next_out, next_squares), SPLITS, GATED, ACT, SOFTCAP, NEXT_NORM)  # fmt: skip
