"""Products of a weight matrix and up to 64 vectors with the matrix units: still the time of reading the matrix once.

A program owns a tile of outputs: ROWS rows of the weight (with their partners when gated) times all vectors. Tiles of
the weight stream through shared memory, several on their way at a time. Every program reads the vectors again, from L2:
wide tiles keep that small against the weight, and cutting the sums into parts keeps enough programs at work.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.finish import added, arrive, finish
from lamina.kernels.launch import begin


@triton.jit
def tiles_kernel(
    x, weight, bias, residual, out, parts, arrived, M, K, N, x_stride, weight_stride, residual_stride, scale,
    N_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): outputs i · ROWS and on for all N vectors, part s of their sums. With TMA, x [N, K] and weight
    are descriptors of [N_BLOCK, BLOCK] and [ROWS, BLOCK] tiles."""
    begin(PDL)
    group, split = tl.program_id(0), tl.program_id(1)
    top = group * ROWS
    m, n, k = top + tl.arange(0, ROWS), tl.arange(0, N_BLOCK), tl.arange(0, BLOCK)
    a = tl.zeros([ROWS, N_BLOCK], dtype=tl.float32)
    b = tl.zeros([ROWS, N_BLOCK], dtype=tl.float32)
    share = tl.cdiv(tl.cdiv(K, BLOCK), SPLITS) * BLOCK  # a part is one stretch of K
    start, stop = split * share, tl.minimum((split + 1) * share, K)
    if not TMA:
        row = weight + tl.minimum(m, M - 1).to(tl.int64)[:, None] * weight_stride + k[None, :]
        partner = row + tl.cast(M, tl.int64) * weight_stride
        column = x + tl.minimum(n, N - 1)[None, :] * x_stride + k[:, None]

    for at in tl.range(start, stop, BLOCK, num_stages=STAGES):
        if TMA:
            w = weight.load([top, at])
            v = tl.trans(x.load([0, at]))
        elif EVEN:
            w = tl.load(row + at, eviction_policy="evict_first")
            v = tl.load(column + at)  # [BLOCK, N]
        else:
            w = tl.load(row + at, mask=(at + k < K)[None, :], other=0, eviction_policy="evict_first")
            v = tl.load(column + at, mask=(at + k < K)[:, None], other=0)
        a = tl.dot(w, v, a, input_precision="ieee")
        if GATED:
            if TMA:
                u = weight.load([M + top, at])
            elif EVEN:
                u = tl.load(partner + at, eviction_policy="evict_first")
            else:
                u = tl.load(partner + at, mask=(at + k < K)[None, :], other=0, eviction_policy="evict_first")
            b = tl.dot(u, v, b, input_precision="ieee")

    keep = (m < M)[:, None] & (n < N)[None, :]
    if SPLITS > 1:
        here = m[:, None] * N_BLOCK + n[None, :]  # parts: [2 or 1, SPLITS, M, N_BLOCK]
        step = M * N_BLOCK
        inside = (m < M)[:, None]
        tl.store(parts + split * step + here, a, mask=inside)
        if GATED:
            tl.store(parts + (SPLITS + split) * step + here, b, mask=inside)
        if arrive(arrived, group, SPLITS):
            a = tl.zeros([ROWS, N_BLOCK], dtype=tl.float32)
            b = tl.zeros([ROWS, N_BLOCK], dtype=tl.float32)
            for s in tl.static_range(SPLITS):
                a += tl.load(parts + s * step + here, mask=inside, other=0, cache_modifier=".cg")
                if GATED:
                    b += tl.load(parts + (SPLITS + s) * step + here, mask=inside, other=0, cache_modifier=".cg")
            first, second, rest = added(n[None, :], m[:, None], keep, M, bias, residual, residual_stride,
                                        GATED, BIAS, RESIDUAL)  # fmt: skip
            finish(a, b, first, second, rest, n[None, :], m[:, None], keep, M, scale, out, GATED, ACT)
    else:
        first, second, rest = added(n[None, :], m[:, None], keep, M, bias, residual, residual_stride,
                                    GATED, BIAS, RESIDUAL)  # fmt: skip
        finish(a, b, first, second, rest, n[None, :], m[:, None], keep, M, scale, out, GATED, ACT)
