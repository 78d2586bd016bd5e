"""GEMV: a weight matrix times one vector, bound by the bandwidth of reading the matrix.

A program reads a few rows of the weight, or with SPLITS every SPLITS-th block of them where the rows alone would be too
few programs. Its first HELD blocks are loaded before the kernel in front has finished, since no kernel writes weights.

A deferred norm in front: x comes undivided, with sums of squares; every program adds these up and divides its own
outputs. A deferred norm behind: outputs are also stored times that norm's weight, and their squares are added to
counters (`deferred_norm.py`).

An inline norm in front: x is the input of a layer norm, which every program computes by itself (`inline_norm.py`).
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.gemm.deferred_norm import partial_squares
from lamina.kernels.gemm.ends import end_rows
from lamina.kernels.gemm.epilogue import wanted
from lamina.kernels.launch import begin


@triton.jit
def _block(start, k, K, POLICY: tl.constexpr, WHOLE: tl.constexpr):
    """The values k of a vector, or of each of several; zero past its K values, unless WHOLE: all of them exist."""
    if WHOLE:
        return tl.load(start + k, eviction_policy=POLICY)
    else:
        return tl.load(start + k, mask=k < K, other=0, eviction_policy=POLICY)


@triton.jit
def rows_kernel(
    x,  # [K]
    weight,  # [M, K], [2M, K] if GATED: gate rows, then up rows
    bias, factors, residual,  # [M] ([2M] if GATED), [M], [M]; read if BIAS, FACTORS, RESIDUAL
    out,  # [M]
    parts, arrived,  # [2 or 1, SPLITS, M] float32 partial sums, [M / ROWS] int32 counters, zero between launches
    squares,  # [SQUARES] of the deferred norm in front, float32 or int64
    norm_weight, norm_bias,  # [K] of the inline norm in front; each may be None
    next_weight, next_out, next_squares, next_plus,  # the norm behind: [M], [M], [LANES, 4] int64, 0.0 or 1.0
    M, K, weight_stride,  # outputs, length of a sum, elements between rows of the weight
    before, scale, softcap, eps,  # factors on x and on the product, bound of the result, eps of the norm in front
    SQUARES: tl.constexpr, NEXT_NORM: tl.constexpr,  # 0: x is divided already; whether a norm behind is prepared
    NORM: tl.constexpr,  # whether x is normed here; then HELD blocks are all of K
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HELD: tl.constexpr, UNROLL: tl.constexpr,  # `Rows`
    EVEN: tl.constexpr,  # BLOCK divides K: no masks
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, FACTORS: tl.constexpr, RESIDUAL: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): outputs i · ROWS … + ROWS, summed over the blocks s, s + SPLITS, s + 2 · SPLITS … of K.

    Order: loads of weights first, which do not depend on the kernel in front; then the wait for that kernel; then the
    small inputs of the epilogue and the squares, whose latency the first products hide."""
    group, split = tl.program_id(0), tl.program_id(1)
    m = group * ROWS + tl.arange(0, ROWS)
    keep = m < M
    row = weight + tl.minimum(m, M - 1).to(tl.int64)[:, None] * weight_stride  # [ROWS, 1]
    partner = row + tl.cast(M, tl.int64) * weight_stride
    ahead = split * BLOCK + tl.arange(0, BLOCK)[None, :]
    held, partners = (), ()
    for i in tl.static_range(HELD):
        held += (_block(row, ahead + i * SPLITS * BLOCK, K, "evict_first", EVEN or i < HELD - 1),)
        if GATED:
            partners += (_block(partner, ahead + i * SPLITS * BLOCK, K, "evict_first", EVEN or i < HELD - 1),)
    norm_factors, norm_shifts = (), ()
    if NORM:
        for i in tl.static_range(HELD):
            if norm_weight is not None:
                norm_factors += (tl.load(norm_weight + ahead + i * BLOCK, eviction_policy="evict_last"),)
            if norm_bias is not None:
                norm_shifts += (tl.load(norm_bias + ahead + i * BLOCK, eviction_policy="evict_last"),)
    next_factor = 1.0
    if NEXT_NORM:
        next_factor = tl.load(next_weight + m, mask=keep, other=0).to(tl.float32) + next_plus
    begin(PDL)
    loaded = wanted(m, m, keep, M, bias, factors, residual, GATED, BIAS, FACTORS, RESIDUAL)
    if SQUARES:
        squared = partial_squares(squares, SQUARES)
    read = ()
    for i in tl.static_range(HELD):
        read += (_block(x, ahead + i * SPLITS * BLOCK, K, "evict_last", EVEN or i < HELD - 1).to(tl.float32),)
    if SQUARES:  # here, where the loads of the held blocks may still be in flight
        before *= tl.rsqrt(tl.sum(squared, 0) / K + eps)
    if NORM:  # two passes over registers: the variance of centred values cancels nothing, however large the mean is
        total = tl.zeros([1, BLOCK], tl.float32)
        spread = total
        for i in tl.static_range(HELD):
            total += read[i]
        mean = tl.sum(total) / K
        for i in tl.static_range(HELD):
            spread += (read[i] - mean) * (read[i] - mean)
        deviation = tl.rsqrt(tl.sum(spread) / K + eps)
        normed = ()
        for i in tl.static_range(HELD):
            value = (read[i] - mean) * deviation
            if norm_weight is not None:
                value *= norm_factors[i].to(tl.float32)
            if norm_bias is not None:
                value += norm_shifts[i].to(tl.float32)
            normed += (value,)
        read = normed
    a = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    b = a

    for i in tl.static_range(HELD):
        a += held[i].to(tl.float32) * read[i]
        if GATED:
            b += partners[i].to(tl.float32) * read[i]
    for start in tl.range((split + HELD * SPLITS) * BLOCK, K, SPLITS * BLOCK, loop_unroll_factor=UNROLL):
        k = start + tl.arange(0, BLOCK)[None, :]
        w = _block(row, k, K, "evict_first", EVEN)
        v = _block(x, k, K, "evict_last", EVEN).to(tl.float32)
        if GATED:
            u = _block(partner, k, K, "evict_first", EVEN)
        a += w.to(tl.float32) * v
        if GATED:
            b += u.to(tl.float32) * v

    y, z = tl.sum(a, 1), tl.sum(b, 1)  # [ROWS]
    end_rows(y, z, loaded, (before, scale, softcap), out, m, keep, M, parts, arrived, group, split,
             (next_factor, next_out, next_squares), SPLITS, GATED, ACT, SOFTCAP, NEXT_NORM)  # fmt: skip
