"""Products of a weight matrix and one or a few vectors, where all the time is that of reading the matrix.

Two forms. `rows_kernel`: a program owns a few rows of the weight (or a part of them, when there are too few rows to
keep the memory busy) and walks along them. `sweep_kernel`: as many programs as fit at once, each keeps the whole vector
in registers and walks down the matrix, whole rows at a time, the next rows already on their way into shared memory; so
the vector is read once, and normalising it first costs no kernel of its own.

While the kernel before is still running, `ahead` rows can be asked into the L2 cache: weights depend on nobody.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.finish import added, arrive, finish
from lamina.kernels.launch import begin


@triton.jit
def fetch_ahead(pointer, size):
    """Asks `size` bytes (a multiple of 16) into the L2 cache; one thread of the program does."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [pointer.to(tl.int64), size.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def times(w, v, N_BLOCK: tl.constexpr):
    """Rows of the weight [ROWS, BLOCK] times vectors [N, BLOCK], number by number -> [N, ROWS, BLOCK]; for one vector
    [ROWS, BLOCK], since a further dimension makes threads exchange what they hold."""
    w = w.to(tl.float32)
    return w * v if N_BLOCK == 1 else w[None, :, :] * v[:, None, :]


@triton.jit
def total(products, N_BLOCK: tl.constexpr):
    """The sums of `times` -> [N, ROWS]"""
    return tl.sum(products, 1)[None, :] if N_BLOCK == 1 else tl.sum(products, 2)


@triton.jit
def rows_kernel(
    x, weight, bias, residual, norm, out, parts, arrived, M, K, x_stride, weight_stride, residual_stride, scale, eps,
    N: tl.constexpr, N_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    UNROLL: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): outputs i · ROWS and on, part s of their sums. M outputs a row; a gated weight has 2M rows.

    The norm's factor 1 / rms(x) is the same for the whole sum, so it is applied at the end."""
    begin(PDL)
    group, split = tl.program_id(0), tl.program_id(1)
    m = group * ROWS + tl.arange(0, ROWS)
    row = weight + tl.minimum(m, M - 1).to(tl.int64)[:, None] * weight_stride  # [ROWS, 1]
    n = tl.arange(0, N_BLOCK)
    x_row = x + tl.minimum(n, N - 1)[:, None] * x_stride  # [N, 1]
    keep = (n < N)[:, None] & (m < M)[None, :]
    first, second, rest = added(n[:, None], m[None, :], keep, M, bias, residual, residual_stride,
                                GATED, BIAS, RESIDUAL)  # fmt: skip
    if N_BLOCK == 1:
        a = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    else:
        a = tl.zeros([N_BLOCK, ROWS, BLOCK], dtype=tl.float32)
    b = a
    squares = tl.zeros([N_BLOCK, BLOCK], dtype=tl.float32)

    for start in tl.range(split * BLOCK, K, SPLITS * BLOCK, loop_unroll_factor=UNROLL, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK)[None, :]
        inside = (k < K) | EVEN
        if EVEN:
            w = tl.load(row + k, eviction_policy="evict_first")
            v = tl.load(x_row + k, eviction_policy="evict_last").to(tl.float32)
        else:
            w = tl.load(row + k, mask=inside, other=0, eviction_policy="evict_first")
            v = tl.load(x_row + k, mask=inside, other=0, eviction_policy="evict_last").to(tl.float32)
        if GATED:
            u = tl.load(
                row + tl.cast(M, tl.int64) * weight_stride + k, mask=inside, other=0, eviction_policy="evict_first"
            )
        if NORM:
            squares += v * v
            v *= tl.load(norm + k, mask=inside, other=0).to(tl.float32) + (1.0 if PLUS_ONE else 0.0)
        a += times(w, v, N_BLOCK)
        if GATED:
            b += times(u, v, N_BLOCK)

    y, z = total(a, N_BLOCK), total(b, N_BLOCK)  # [N, ROWS]
    square = tl.sum(squares, 1)  # [N]
    if SPLITS == 1:
        if NORM:
            factor = tl.rsqrt(square / K + eps)[:, None]
            y, z = y * factor, z * factor
        finish(y, z, first, second, rest, n[:, None], m[None, :], keep, M, scale, out, GATED, ACT)
    else:
        # parts: [2 or 1, SPLITS, N, M], then the sums of squares [groups, SPLITS, N]
        s = tl.arange(0, SPLITS)[:, None, None]
        here = n[:, None] * M + m[None, :]
        step = N * M
        tl.store(parts + split * step + here, y, mask=keep)
        if GATED:
            tl.store(parts + (SPLITS + split) * step + here, z, mask=keep)
        beyond = parts + 2 * SPLITS * step + group * SPLITS * N
        if NORM:
            tl.store(beyond + split * N + n, square, mask=n < N)
        if arrive(arrived, group, SPLITS):
            every = s * step + here[None, :, :]
            y = tl.sum(tl.load(parts + every, mask=keep[None, :, :], other=0, cache_modifier=".cg"), 0)
            z = y
            if GATED:
                z = tl.sum(
                    tl.load(parts + SPLITS * step + every, mask=keep[None, :, :], other=0, cache_modifier=".cg"), 0
                )
            if NORM:
                places = beyond + tl.arange(0, SPLITS)[:, None] * N + n[None, :]
                square = tl.sum(tl.load(places, mask=(n < N)[None, :], other=0, cache_modifier=".cg"), 0)
                factor = tl.rsqrt(square / K + eps)[:, None]
                y, z = y * factor, z * factor
            finish(y, z, first, second, rest, n[:, None], m[None, :], keep, M, scale, out, GATED, ACT)


@triton.jit
def sweep_kernel(
    x, weight, bias, residual, norm, out, M, K, x_stride, weight_stride, residual_stride, scale, eps,
    N: tl.constexpr, N_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, NORM: tl.constexpr, PLUS_ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program p: the groups of ROWS outputs p, p + programs, p + 2 programs … ; BLOCK holds all of K."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    groups = tl.cdiv(M, ROWS)
    size = ROWS * weight_stride * (weight.dtype.element_ty.primitive_bitwidth // 8)
    for i in tl.static_range(AHEAD):
        top = (program + i * programs) * ROWS
        if top + ROWS <= M:
            fetch_ahead(weight + top.to(tl.int64) * weight_stride, size)
            if GATED:
                fetch_ahead(weight + (M + top).to(tl.int64) * weight_stride, size)
    begin(PDL)

    n, k = tl.arange(0, N_BLOCK), tl.arange(0, BLOCK)
    inside = (k < K)[None, :] | EVEN
    v = tl.load(x + tl.minimum(n, N - 1)[:, None] * x_stride + k[None, :], mask=inside, other=0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(v * v, 1) / K + eps)[:, None]
        v *= factor * (tl.load(norm + k, mask=k < K, other=0).to(tl.float32) + (1.0 if PLUS_ONE else 0.0))[None, :]

    for group in tl.range(program, groups, programs, num_stages=STAGES):
        m = group * ROWS + tl.arange(0, ROWS)
        keep = (n < N)[:, None] & (m < M)[None, :]
        first, second, rest = added(n[:, None], m[None, :], keep, M, bias, residual, residual_stride,
                                    GATED, BIAS, RESIDUAL)  # fmt: skip
        row = weight + tl.minimum(m, M - 1).to(tl.int64)[:, None] * weight_stride + k[None, :]
        if EVEN:
            w = tl.load(row, eviction_policy="evict_first")
        else:
            w = tl.load(row, mask=inside, other=0, eviction_policy="evict_first")
        y = total(times(w, v, N_BLOCK), N_BLOCK)  # [N, ROWS]
        z = y
        if GATED:
            if EVEN:
                u = tl.load(row + tl.cast(M, tl.int64) * weight_stride, eviction_policy="evict_first")
            else:
                u = tl.load(
                    row + tl.cast(M, tl.int64) * weight_stride, mask=inside, other=0, eviction_policy="evict_first"
                )
            z = total(times(u, v, N_BLOCK), N_BLOCK)
        finish(y, z, first, second, rest, n[:, None], m[None, :], keep, M, scale, out, GATED, ACT)
