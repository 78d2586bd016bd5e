"""Products of a weight matrix and one vector, where all the time is that of reading the matrix.

A program owns a few rows of the weight, or a part of them when there are too few rows to keep the memory busy, and
walks along them. The first HELD blocks of its rows are asked for before the kernel in front has finished: weights
depend on nobody.

An RMS norm in front divides the whole vector by one number, so that number may as well divide the outputs: the vector
comes before it is divided, with the sums of squares of its parts, which every program adds up. For a norm behind, the
outputs go out with its weight on them too, and their squares into a sum (`deferred_norm.py`).
"""

# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.gemm.deferred_norm import partial_squares, prepare_norm
from lamina.kernels.gemm.epilogue import arrive, finish, wanted
from lamina.kernels.launch import begin


@triton.jit
def rows_kernel(
    x, weight, bias, factors, residual, out, parts, arrived, squares, next_weight, next_out, next_squares, next_plus,
    M, K, weight_stride, before, scale, softcap, eps, SQUARES: tl.constexpr,
    NEXT_NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HELD: tl.constexpr,
    UNROLL: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    FACTORS: tl.constexpr, RESIDUAL: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): outputs i · ROWS and on, part s of their sums. M outputs; a gated weight has 2M rows. SQUARES:
    how many sums of squares there are; 0 where the vector is divided. NEXT_NORM: there is a norm behind."""
    group, split = tl.program_id(0), tl.program_id(1)
    m = group * ROWS + tl.arange(0, ROWS)
    keep = m < M
    row = weight + tl.minimum(m, M - 1).to(tl.int64)[:, None] * weight_stride  # [ROWS, 1]
    partner = row + tl.cast(M, tl.int64) * weight_stride
    ahead = split * BLOCK + tl.arange(0, BLOCK)[None, :]
    held, partners = (), ()
    for i in tl.static_range(HELD):
        held += (tl.load(row + ahead + i * SPLITS * BLOCK, eviction_policy="evict_first"),)
        if GATED:
            partners += (tl.load(partner + ahead + i * SPLITS * BLOCK, eviction_policy="evict_first"),)
    next_factor = 1.0
    if NEXT_NORM:
        next_factor = tl.load(next_weight + m, mask=keep, other=0).to(tl.float32) + next_plus
    begin(PDL)
    first, second, factor, rest = wanted(m, m, keep, M, bias, factors, residual, GATED, BIAS, FACTORS, RESIDUAL)
    if SQUARES:
        squared = partial_squares(squares, SQUARES)
    read = ()
    for i in tl.static_range(HELD):
        read += (tl.load(x + ahead + i * SPLITS * BLOCK, eviction_policy="evict_last").to(tl.float32),)
    if SQUARES:  # now, while the blocks that are held may be on their way
        before *= tl.rsqrt(tl.sum(squared, 0) / K + eps)
    a = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    b = a

    for i in tl.static_range(HELD):
        a += held[i].to(tl.float32) * read[i]
        if GATED:
            b += partners[i].to(tl.float32) * read[i]
    for start in tl.range((split + HELD * SPLITS) * BLOCK, K, SPLITS * BLOCK, loop_unroll_factor=UNROLL):
        k = start + tl.arange(0, BLOCK)[None, :]
        inside = (k < K) | EVEN
        if EVEN:
            w = tl.load(row + k, eviction_policy="evict_first")
            v = tl.load(x + k, eviction_policy="evict_last").to(tl.float32)
        else:
            w = tl.load(row + k, mask=inside, other=0, eviction_policy="evict_first")
            v = tl.load(x + k, mask=inside, other=0, eviction_policy="evict_last").to(tl.float32)
        if GATED:
            u = tl.load(partner + k, mask=inside, other=0, eviction_policy="evict_first")
        a += w.to(tl.float32) * v
        if GATED:
            b += u.to(tl.float32) * v

    y, z = tl.sum(a, 1), tl.sum(b, 1)  # [ROWS]
    if SPLITS == 1:
        done = finish(y, z, first, second, factor, rest, before, scale, softcap, out + m, keep, GATED, ACT, SOFTCAP)
        if NEXT_NORM:
            prepare_norm(done, next_factor, next_out + m, next_squares, keep)
    else:
        tl.store(parts + split * M + m, y, mask=keep)  # parts: [2 or 1, SPLITS, M]
        if GATED:
            tl.store(parts + (SPLITS + split) * M + m, z, mask=keep)
        if arrive(arrived, group, SPLITS):
            every = tl.arange(0, SPLITS)[:, None] * M + m[None, :]
            y = tl.sum(tl.load(parts + every, mask=keep[None, :], other=0, cache_modifier=".cg"), 0)
            z = y
            if GATED:
                z = tl.sum(tl.load(parts + SPLITS * M + every, mask=keep[None, :], other=0, cache_modifier=".cg"), 0)
            done = finish(y, z, first, second, factor, rest, before, scale, softcap, out + m, keep, GATED, ACT, SOFTCAP)
            if NEXT_NORM:
                prepare_norm(done, next_factor, next_out + m, next_squares, keep)
