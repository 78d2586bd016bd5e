"""Mixture of experts over packed weights in a captured step, for few tokens.

    packed_expert_gated   act(gate(x)) · up(x) of each chosen expert, or act(up(x)), times the router's weight
    packed_expert_down    the sum of the chosen experts' down products, plus an optional residual

As `gemm/experts.py`, with the products of `gemv.py`: each (token, expert) pair reads its expert's codes in place. The
matrices of all experts are one `PackedMatrix` [E · M, K]. A shared expert has launches of its own. The reference is
`lamina.nn.Experts` over packed weights.
"""

# mypy: allow-untyped-defs, disable-error-code=assignment
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lamina.activation import Gating
from lamina.kernels.gemm.deferred_norm import DeferredNorm, norm_arguments, norm_factor, prepare_norm
from lamina.kernels.gemm.epilogue import act_kind, joined
from lamina.kernels.launch import begin, launch
from lamina.kernels.packed.gemv import add_block, row_sums
from lamina.kernels.packed.matrix import SPANS, PackedMatrix
from lamina.kernels.packed.product import kernel_parts, native_fp8, scaling

ROWS = 4  # outputs of a program, and as many gates


def packed_expert_gated(
    x: Tensor,
    first: PackedMatrix,
    chosen: Tensor,
    weights: Tensor,
    gating: Gating,
    *,
    experts: int,
    gated: bool = True,
    bias: Tensor | None = None,
    identity: bool = False,
    weigh_input: bool = False,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """x [N, K], first [E · 2I, K] (of each expert gates, then ups), chosen and weights [N, k] -> [N, k · I]

    Arguments as for `gemm/experts.expert_gated`.
    """
    (tokens, width), k = x.shape, chosen.shape[1]
    inner = first.shape[0] // experts // (1 + gated)
    out = x.new_empty(tokens, k * inner)
    launch(
        _packed_gated_kernel, (tokens * k * triton.cdiv(inner, ROWS),),
        x, *kernel_parts(first), x if bias is None else bias, chosen.contiguous(), weights.contiguous(), squares, out,
        tokens, width, x.stride(0), eps, SQUARES=0 if squares is None else len(squares), CHOICES=k, EXPERTS=experts,
        INNER=inner, GATED=gated, ACT=act_kind(gating.act), LIMIT=gating.limit or 0.0, PLUS=gating.plus,
        SLOPE=gating.slope, BIAS=bias is not None, IDENTITY=identity, WEIGH_INPUT=weigh_input, **_shape(first, x),
    )  # fmt: skip
    return out


def packed_expert_down(
    h: Tensor,
    down: PackedMatrix,
    chosen: Tensor,
    weights: Tensor,
    *,
    experts: int,
    bias: Tensor | None = None,
    identity: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    next_norm: DeferredNorm | None = None,
) -> Tensor:
    """h [N, k · I], down [E · W, I], chosen and weights [N, k], residual [N, W] -> [N, W]

    Arguments as for `gemm/experts.expert_down`.
    """
    tokens, k, inner = h.shape[0], chosen.shape[1], down.shape[1]
    width = down.shape[0] // experts
    out = h.new_empty(tokens, width, dtype=None if residual is None else residual.dtype)
    launch(
        _packed_down_kernel, (triton.cdiv(width, ROWS), tokens),
        h, *kernel_parts(down), h if bias is None else bias, chosen.contiguous(), weights.contiguous(),
        h if identity is None else identity, squares, h if residual is None else residual, out,
        *norm_arguments(next_norm), inner, 0 if identity is None else identity.stride(0),
        0 if residual is None else residual.stride(0), eps, SQUARES=0 if squares is None else len(squares), CHOICES=k,
        EXPERTS=experts, W=width, BIAS=bias is not None, IDENTITY=identity is not None, RESIDUAL=residual is not None,
        NEXT_NORM=next_norm is not None, **_shape(down, h),
    )  # fmt: skip
    return out


def _shape(weight: PackedMatrix, x: Tensor) -> dict[str, Any]:
    """Sizes of a program: as many warps as fill blocks that divide K, each thread with 16 bytes of a row."""
    span, k = SPANS[weight.kind], weight.shape[1]
    warps = next((warps for warps in (4, 2, 1) if k % (32 * span * warps) == 0), 1)
    block = min(32 * span * warps, max(span, triton.next_power_of_2(k)))
    return dict(
        SPAN=span, NATIVE=native_fp8(x), ROWS=ROWS, BLOCK=block, EVEN=k % block == 0, num_warps=warps,
        **scaling(weight),
    )  # fmt: skip


@triton.jit
def expert_sums(
    x, codes, scales, zeros, first, last, apart, K, code_stride, scale_stride,
    KIND: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SIGNED: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The rows first … first + ROWS, none after `last`, times x [K], [ROWS] float32; and if GATED those `apart` rows
    further on, otherwise the same again."""
    PIECES: tl.constexpr = BLOCK // SPAN
    a = ()
    for _ in tl.static_range(ROWS):
        a += (tl.zeros([PIECES], tl.float32),)
    b = a
    for start in tl.range(0, K, BLOCK):
        a, b = add_block(a, b, x, codes, scales, zeros, first, last, apart, start, K, code_stride, scale_stride, KIND,
                         SPAN, GROUP, SIDE, SIGNED, ZEROS, SCALED, NATIVE, ROWS, PIECES, EVEN, GATED)  # fmt: skip
    y = row_sums(a, ROWS)
    z = row_sums(b, ROWS) if GATED else y
    if not SCALED:
        r = tl.minimum(first + tl.arange(0, ROWS), last)
        y *= tl.load(scales + r * scale_stride).to(tl.float32)
        z = z * tl.load(scales + (r + apart) * scale_stride).to(tl.float32) if GATED else y
    return y, z


@triton.jit
def _packed_gated_kernel(
    x,  # [N, K]
    codes, scales, zeros, code_stride, scale_stride,  # of [E · 2 · INNER, K]: of each expert gate rows, then up rows
    bias,  # [E, 2 · INNER]
    chosen, weights,  # [N, CHOICES] expert ids and weights
    squares,  # [SQUARES] of the norm in front, float32 or int64
    out,  # [N, CHOICES · INNER]
    N, K, x_stride, eps,  # tokens, length of a sum, elements between rows of x, eps of the norm
    SQUARES: tl.constexpr,  # 0: x is divided already
    CHOICES: tl.constexpr, EXPERTS: tl.constexpr, INNER: tl.constexpr,  # sizes
    KIND: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SIGNED: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, PLUS: tl.constexpr, SLOPE: tl.constexpr,  # `Gating`
    BIAS: tl.constexpr, IDENTITY: tl.constexpr, WEIGH_INPUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, p): outputs i · ROWS … + ROWS of the pair p = token · CHOICES + choice. Pairs are the fast dimension,
    so tokens that chose the same expert share its rows in L2."""
    begin(PDL)
    MATRICES: tl.constexpr = 1 + GATED
    pairs = N * CHOICES
    pair = tl.program_id(0) % pairs
    expert, factor = tl.load(chosen + pair).to(tl.int64), tl.load(weights + pair).to(tl.float32)
    n = (pair // CHOICES).to(tl.int64)
    group = tl.program_id(0) // pairs * ROWS
    i = group + tl.arange(0, ROWS)
    if IDENTITY:
        factor, expert = tl.where(expert < EXPERTS, factor, 0.0), tl.minimum(expert, EXPERTS - 1)
    start = expert * (MATRICES * INNER)
    if BIAS:
        gate_bias = tl.load(bias + start + i, mask=i < INNER, other=0)
        up_bias = tl.load(bias + start + INNER + i, mask=i < INNER, other=0) if GATED else gate_bias
    y, z = expert_sums(x + n * x_stride, codes, scales, zeros, start + group, start + INNER - 1, INNER, K, code_stride,
                       scale_stride, KIND, SPAN, GROUP, SIDE, SIGNED, ZEROS, SCALED, NATIVE, ROWS, BLOCK, EVEN,
                       GATED)  # fmt: skip
    division = norm_factor(squares, K, eps, SQUARES)
    y, z = y * division, z * division
    if WEIGH_INPUT:
        y, z = y * factor, z * factor
    if BIAS:
        y, z = y + gate_bias.to(tl.float32), z + up_bias.to(tl.float32)
    y = joined(y, z, ACT, GATED, LIMIT, PLUS, SLOPE)
    if not WEIGH_INPUT:
        y *= factor
    tl.store(out + pair.to(tl.int64) * INNER + i, y.to(out.dtype.element_ty), mask=i < INNER)


@triton.jit
def _packed_down_kernel(
    h,  # [N, CHOICES · K]
    codes, scales, zeros, code_stride, scale_stride,  # of [E · W, K]
    bias,  # [E, W]
    chosen, weights,  # [N, CHOICES]
    x, squares,  # [N, W] the input of identity experts, and [SQUARES] of the norm that it still needs
    residual, out,  # [N, W]; residual is read if RESIDUAL
    next_weight, next_out, next_squares, next_plus,  # the norm behind: [W], [W], [LANES, 4] int64, 0.0 or 1.0
    K, x_stride, residual_stride, eps,
    SQUARES: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SIGNED: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr, IDENTITY: tl.constexpr, RESIDUAL: tl.constexpr, NEXT_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, n): outputs i · ROWS … + ROWS of token n, summed over all its experts."""
    begin(PDL)
    n = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * ROWS
    m = group + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    if RESIDUAL:
        total = tl.load(residual + n * residual_stride + m, mask=m < W, other=0).to(tl.float32)
    if IDENTITY:
        own_input = tl.load(x + n * x_stride + m, mask=m < W, other=0).to(tl.float32)
        own_input *= norm_factor(squares, W, eps, SQUARES)
    for j in tl.range(CHOICES):
        expert = tl.load(chosen + n * CHOICES + j).to(tl.int64)
        factor = tl.load(weights + n * CHOICES + j).to(tl.float32)
        real = expert < EXPERTS
        start = tl.minimum(expert, EXPERTS - 1) * W
        y, _ = expert_sums(h + (n * CHOICES + j) * K, codes, scales, zeros, start + group, start + W - 1, 0, K,
                           code_stride, scale_stride, KIND, SPAN, GROUP, SIDE, SIGNED, ZEROS, SCALED, NATIVE, ROWS,
                           BLOCK, EVEN, False)  # fmt: skip
        if BIAS:
            y += factor * tl.load(bias + start + m, mask=m < W, other=0).to(tl.float32)
        if IDENTITY:
            y = tl.where(real, y, factor * own_input)
        total += y
    done = total.to(out.dtype.element_ty)
    tl.store(out + n * W + m, done, mask=m < W)
    if NEXT_NORM:
        next_factor = tl.load(next_weight + m, mask=m < W, other=0).to(tl.float32) + next_plus
        prepare_norm(done, next_factor, next_out + m, next_squares, m < W)
