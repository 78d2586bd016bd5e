"""How product kernels end: partial sums of programs that share a sum (split-K) are added, and the epilogue stores.

    end_rows     one vector: sums [ROWS], and the deferred norm behind
    end_tile     several vectors: sums [ROWS, N_BLOCK]

A program that shares its sums stores them in the workspace; the last to arrive reads all, past the L1 cache, since
other programs wrote them, and always in the same order, so results repeat.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.gemm.deferred_norm import prepare_norm
from lamina.kernels.gemm.epilogue import arrive, finish, wanted


@triton.jit
def end_rows(
    y, z,  # float32 [ROWS] sums of this program; z those of the up rows, read if GATED
    loaded, bounds,  # what `wanted` loaded; (before, scale, softcap) of `finish`
    out, m, keep, M,  # [M]; outputs of this program and which exist, [ROWS]; how many there are
    parts, arrived, group, split,  # [2 or 1, SPLITS, M] partial sums, [M / ROWS] counters; which program this is
    behind,  # (factor [ROWS], next_out [M], next_squares) of the deferred norm, read if NEXT_NORM
    SPLITS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, SOFTCAP: tl.constexpr, NEXT_NORM: tl.constexpr,
):  # fmt: skip
    """Stores this program's outputs, unless another program of its group is still to arrive."""
    if SPLITS == 1:
        _finish_rows(y, z, loaded, bounds, out, m, keep, behind, GATED, ACT, SOFTCAP, NEXT_NORM)
    else:
        tl.store(parts + split * M + m, y, mask=keep)
        if GATED:
            tl.store(parts + (SPLITS + split) * M + m, z, mask=keep)
        if arrive(arrived, group, SPLITS):
            every = tl.arange(0, SPLITS)[:, None] * M + m[None, :]  # [SPLITS, ROWS]
            y = tl.sum(tl.load(parts + every, mask=keep[None, :], other=0, cache_modifier=".cg"), 0)
            z = y
            if GATED:
                z = tl.sum(tl.load(parts + SPLITS * M + every, mask=keep[None, :], other=0, cache_modifier=".cg"), 0)
            _finish_rows(y, z, loaded, bounds, out, m, keep, behind, GATED, ACT, SOFTCAP, NEXT_NORM)


@triton.jit
def _finish_rows(
    y, z, loaded, bounds, out, m, keep, behind, GATED: tl.constexpr, ACT: tl.constexpr, SOFTCAP: tl.constexpr,
    NEXT_NORM: tl.constexpr,
):  # fmt: skip
    first, second, factor, rest = loaded
    before, scale, softcap = bounds
    done = finish(y, z, first, second, factor, rest, before, scale, softcap, out + m, keep, GATED, ACT, SOFTCAP)
    if NEXT_NORM:
        next_factor, next_out, next_squares = behind
        prepare_norm(done, next_factor, next_out + m, next_squares, keep)


@triton.jit
def end_tile(
    a, b,  # float32 [ROWS, N_BLOCK] sums of this program; b those of the up rows, read if GATED
    pointers, bounds,  # (bias, factors, residual) of `wanted`, loaded here; (before, scale, softcap) of `finish`
    out, m, n, M, N,  # [N, M]; outputs [ROWS] and vectors [N_BLOCK] of this program; how many there are
    residual_stride, out_stride,
    parts, arrived, group, split,  # [2 or 1, SPLITS, M, N_BLOCK] partial sums, [M / ROWS] counters; which program
    N_BLOCK: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    FACTORS: tl.constexpr, RESIDUAL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """As `end_rows`. The inputs of the epilogue are loaded by the program that stores the outputs."""
    keep = (m < M)[:, None] & (n < N)[None, :]
    at = n[None, :] * residual_stride + m[:, None]
    out += n[None, :] * out_stride + m[:, None]
    if SPLITS == 1:
        _finish_tile(a, b, pointers, bounds, out, at, m, keep, M, GATED, ACT, BIAS, FACTORS, RESIDUAL, SOFTCAP)
    else:
        here = m[:, None] * N_BLOCK + n[None, :]  # [ROWS, N_BLOCK]
        step = M * N_BLOCK
        inside = (m < M)[:, None]
        tl.store(parts + split * step + here, a, mask=inside)
        if GATED:
            tl.store(parts + (SPLITS + split) * step + here, b, mask=inside)
        if arrive(arrived, group, SPLITS):
            a = tl.zeros(a.shape, dtype=tl.float32)
            b = tl.zeros(a.shape, dtype=tl.float32)
            for s in tl.static_range(SPLITS):
                a += tl.load(parts + s * step + here, mask=inside, other=0, cache_modifier=".cg")
                if GATED:
                    b += tl.load(parts + (SPLITS + s) * step + here, mask=inside, other=0, cache_modifier=".cg")
            _finish_tile(a, b, pointers, bounds, out, at, m, keep, M, GATED, ACT, BIAS, FACTORS, RESIDUAL, SOFTCAP)


@triton.jit
def _finish_tile(
    a, b, pointers, bounds, out, at, m, keep, M, GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    FACTORS: tl.constexpr, RESIDUAL: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    bias, factors, residual = pointers
    before, scale, softcap = bounds
    first, second, factor, rest = wanted(m[:, None], at, keep, M, bias, factors, residual, GATED, BIAS, FACTORS,
                                         RESIDUAL)  # fmt: skip
    finish(a, b, first, second, factor, rest, before, scale, softcap, out, keep, GATED, ACT, SOFTCAP)
