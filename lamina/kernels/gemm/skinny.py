"""Skinny GEMM: a weight matrix times up to 64 vectors on tensor cores, still in the time of reading the matrix once.

A program computes a tile of outputs: ROWS rows of the weight (gate and up rows if gated) times all vectors. Tiles of
the weight stream through shared memory, STAGES of them in flight. Every program reads the vectors again, from L2: tall
tiles keep that small against the weight, and splitting K keeps enough programs busy.

A dot product adds one term after the other, so rounding grows with the length of a sum. For bfloat16 that is far below
the rounding of the result. For float32 each tile has a sum of its own (APART), and these are added with Kahan's
compensation.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.gemm.ends import end_tile
from lamina.kernels.gemm.epilogue import plus
from lamina.kernels.launch import begin


@triton.jit
def tiles_kernel(
    x,  # [N, K]
    weight,  # [M, K], [2M, K] if GATED: gate rows, then up rows
    bias, factors, residual,  # [M] ([2M] if GATED), [M], [N, M]; read if BIAS, FACTORS, RESIDUAL
    out,  # [N, M]
    parts, arrived,  # [2 or 1, SPLITS, M, N_BLOCK] float32 partial sums, [M / ROWS] int32, zero between launches
    M, K, N, x_stride, weight_stride, residual_stride,  # outputs, length of a sum, vectors; elements between rows
    before, scale, softcap,  # factors on x and on the product, bound of the result
    N_BLOCK: tl.constexpr,  # N padded to a power of two, at least 16
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,  # `Tiles`
    APART: tl.constexpr, EVEN: tl.constexpr,  # whether tiles have sums of their own; BLOCK divides K: no masks
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, FACTORS: tl.constexpr, RESIDUAL: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): outputs i · ROWS … + ROWS of all N vectors, summed over the s-th of SPLITS contiguous parts of K.

    The inputs of the epilogue are loaded after the loop, by the program that stores the outputs."""
    begin(PDL)
    group, split = tl.program_id(0), tl.program_id(1)
    m, n, k = group * ROWS + tl.arange(0, ROWS), tl.arange(0, N_BLOCK), tl.arange(0, BLOCK)
    share = tl.cdiv(tl.cdiv(K, BLOCK), SPLITS) * BLOCK  # contiguous: tiles stream in order
    start, stop = split * share, tl.minimum((split + 1) * share, K)
    row = weight + tl.minimum(m, M - 1).to(tl.int64)[:, None] * weight_stride + k[None, :]  # [ROWS, BLOCK]
    partner = row + tl.cast(M, tl.int64) * weight_stride
    column = x + tl.minimum(n, N - 1)[None, :] * x_stride + k[:, None]  # [BLOCK, N_BLOCK]
    a, b = tl.zeros([ROWS, N_BLOCK], tl.float32), tl.zeros([ROWS, N_BLOCK], tl.float32)
    a_lost, b_lost = a, b
    for at in tl.range(start, stop, BLOCK, num_stages=STAGES):
        inside = (at + k < K) | EVEN
        w = tl.load(row + at, mask=inside[None, :], other=0, eviction_policy="evict_first")
        v = tl.load(column + at, mask=inside[:, None], other=0)  # [BLOCK, N_BLOCK]
        if APART:
            a, a_lost = plus(a, a_lost, tl.dot(w, v, input_precision="ieee"))
        else:
            a = tl.dot(w, v, a)
        if GATED:
            u = tl.load(partner + at, mask=inside[None, :], other=0, eviction_policy="evict_first")
            if APART:
                b, b_lost = plus(b, b_lost, tl.dot(u, v, input_precision="ieee"))
            else:
                b = tl.dot(u, v, b)

    end_tile(a, b, (bias, factors, residual), (before, scale, softcap), out, m, n, M, N, residual_stride, M,
             parts, arrived, group, split, N_BLOCK, SPLITS, GATED, ACT, BIAS, FACTORS, RESIDUAL, SOFTCAP)  # fmt: skip
