"""RMS and layer norms: one program normalises one vector, which it reads once and keeps in registers.

rms_norm          residual + x / rms(x) · weight, as `lamina.nn.RMSNorm`
rms_norm_twice    the same, and a second norm of that sum in the same launch
layer_norm        residual + (x - mean(x)) / std(x) · weight + bias, as `lamina.nn.LayerNorm`
gated_rms_norm    norm(x · act(gate)) or norm(x) · act(gate), in groups, as `lamina.nn.GatedRMSNorm`
sigmoid_gated     x · sigmoid(gate), no norm
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.launch import begin, launch


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    plus_one: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """residual + norm(x), rounded once, to `dtype` or that of x.

    x [N, W] or [N, H, W], W contiguous; weight [W]; residual of x's shape, contiguous -> x's shape, contiguous

    plus_one   the factor is 1 + weight
    """
    shape, width = x.shape, x.shape[-1]
    x = x[None] if x.dim() == 2 else x  # [N, H, W]
    out = x.new_empty(x.shape, dtype=dtype)
    launch(
        _norm_kernel, (x.shape[0], x.shape[1]),
        x, x if weight is None else weight, x if residual is None else residual, out, x, out,
        width, x.stride(0), x.stride(1), eps, eps,
        BLOCK=triton.next_power_of_2(width), WEIGHT=weight is not None, PLUS_ONE=plus_one,
        RESIDUAL=residual is not None, TWICE=False, num_warps=_warps(width),
    )  # fmt: skip
    return out.view(shape)


def rms_norm_twice(
    x: Tensor, residual: Tensor, weights: tuple[Tensor, Tensor], eps: tuple[float, float], *, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """y = residual + norm(x), and a second norm, of y as it is stored, both in the residual's dtype.

    x and residual [N, W], contiguous; two weights [W] -> y [N, W], its norm [N, W]
    """
    rows, width = x.shape
    out, normed = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    launch(
        _norm_kernel, (1, rows),
        x, weights[0], residual, out, weights[1], normed, width, 0, x.stride(0), *eps,
        BLOCK=triton.next_power_of_2(width), WEIGHT=True, PLUS_ONE=plus_one, RESIDUAL=True, TWICE=True,
        num_warps=_warps(width),
    )  # fmt: skip
    return out, normed


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """residual + norm(x) with the mean subtracted, rounded once, to `dtype` or that of x.

    x [N, W], W contiguous; weight and bias [W]; residual [N, W], contiguous -> [N, W], contiguous
    """
    rows, width = x.shape
    out = x.new_empty(rows, width, dtype=dtype)
    launch(
        _layer_norm_kernel, (rows,),
        x, *(x if one is None else one for one in (weight, bias, residual)), out, width, x.stride(0), eps,
        BLOCK=triton.next_power_of_2(width), WEIGHT=weight is not None, BIAS=bias is not None,
        RESIDUAL=residual is not None, num_warps=_warps(width),
    )  # fmt: skip
    return out


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate). Both [B, H, T, D] with the H · D values of a token contiguous -> [B, H, T, D]"""
    B, H, T, D = x.shape
    width = H * D
    out = torch.empty(B, T, H, D, dtype=x.dtype, device=x.device)
    launch(
        _gate_kernel, (B * T, triton.cdiv(width, 1024)),
        x, gate, out, x.stride(0), x.stride(2), gate.stride(0), gate.stride(2), width,
        T=T, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int = 1, gate_first: bool = True,
    sigmoid: bool = False,
) -> Tensor:  # fmt: skip
    """norm(x · silu(gate)) if `gate_first`, else norm(x) · silu(gate), for each of `groups` equal parts by itself.

    sigmoid   sigmoid(gate) in place of silu(gate)

    x [N, W] and gate [N, W] or [N / H, H, W], W contiguous; weight [W] -> [N, W] in the gate's dtype
    """
    rows, width = x.shape
    group = width // groups
    out = gate.new_empty(rows, width)
    gate = gate[:, None] if gate.dim() == 2 else gate
    if groups == 1 and rows >= MANY_ROWS and (block := triton.next_power_of_2(width)) <= NARROW:
        together = TILE // block
        launch(
            _gated_norm_rows, (triton.cdiv(rows, together),),
            x, gate, weight, out, rows, width, x.stride(0), *gate.stride()[:2], eps, HEADS=gate.shape[1],
            ROWS=together, BLOCK=block, GATE_FIRST=gate_first, SIGMOID=sigmoid, num_warps=4,
        )  # fmt: skip
        return out
    launch(
        _gated_norm_kernel, (rows, groups),
        x, gate, weight, out, group, x.stride(0), *gate.stride()[:2], eps, HEADS=gate.shape[1],
        BLOCK=triton.next_power_of_2(group), GATE_FIRST=gate_first, SIGMOID=sigmoid,
        num_warps=_warps(group),
    )  # fmt: skip
    return out


MANY_ROWS, NARROW, TILE = 4096, 512, 2048  # prompts: vectors up to NARROW values, TILE values in one program


def _warps(width: int) -> int:
    """Eight values per thread, up to 16 warps; more are not faster."""
    return min(16, max(1, triton.next_power_of_2(width) // 256))


@triton.jit
def _norm_kernel(
    x,  # [N, H, W], strides stride_n, stride_h, 1
    weight, residual,  # [W], [N, H, W]; read if WEIGHT, RESIDUAL
    out,  # [N, H, W]
    next_weight, next_out,  # the second norm: [W], [N, H, W]; used if TWICE
    W, stride_n, stride_h, eps, next_eps,  # width, elements between vectors of x, eps of both norms
    BLOCK: tl.constexpr,  # W padded to a power of two
    WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, RESIDUAL: tl.constexpr, TWICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, h): vector (n, h).

    All loads are issued before the first value is used; those of weights, which no kernel writes, before the wait for
    the kernel in front. The second norm reads y as rounded for the store, so it is the norm of what others read."""
    n, h = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    inside = k < W
    here = (n * tl.num_programs(1) + h) * W + k
    plus = 1.0 if PLUS_ONE else 0.0
    if WEIGHT:
        scale = tl.load(weight + k, mask=inside, other=0).to(tl.float32) + plus
    if TWICE:
        next_scale = tl.load(next_weight + k, mask=inside, other=0).to(tl.float32) + plus
    begin(PDL)
    y = tl.load(x + n * stride_n + h * stride_h + k, mask=inside, other=0).to(tl.float32)
    if RESIDUAL:
        rest = tl.load(residual + here, mask=inside, other=0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y) / W + eps)
    if WEIGHT:
        y *= scale
    if RESIDUAL:
        y += rest
    y = y.to(out.dtype.element_ty)
    tl.store(out + here, y, mask=inside)
    if TWICE:
        z = y.to(tl.float32)
        z *= tl.rsqrt(tl.sum(z * z) / W + next_eps) * next_scale
        tl.store(next_out + here, z.to(next_out.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_kernel(
    x,  # [N, W], x_stride between rows
    weight, bias, residual,  # [W], [W], [N, W]; read if WEIGHT, BIAS, RESIDUAL
    out,  # [N, W]
    W, x_stride, eps,
    BLOCK: tl.constexpr,  # W padded to a power of two
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n): row n. The variance is the mean square of the centred values, which cancels nothing."""
    n = tl.cast(tl.program_id(0), tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < W
    if WEIGHT:
        scale = tl.load(weight + k, mask=inside, other=0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + k, mask=inside, other=0).to(tl.float32)
    begin(PDL)
    y = tl.load(x + n * x_stride + k, mask=inside, other=0).to(tl.float32)
    if RESIDUAL:
        rest = tl.load(residual + n * W + k, mask=inside, other=0).to(tl.float32)
    y = tl.where(inside, y - tl.sum(y) / W, 0.0)
    y *= tl.rsqrt(tl.sum(y * y) / W + eps)
    if WEIGHT:
        y *= scale
    if BIAS:
        y += shift
    if RESIDUAL:
        y += rest
    tl.store(out + n * W + k, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(
    x, gate,  # [B, T, W], W contiguous
    out,  # [B, T, W] contiguous
    x_row, x_token, gate_row, gate_token, W,  # elements between rows and between tokens; width
    T: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j): values j · BLOCK … + BLOCK of token i = row · T + t."""
    begin(PDL)
    row, t = tl.program_id(0) // T, tl.program_id(0) % T
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + row * x_row + t * x_token + k, mask=k < W, other=0).to(tl.float32)
    y *= tl.sigmoid(tl.load(gate + row * gate_row + t * gate_token + k, mask=k < W, other=0).to(tl.float32))
    tl.store(out + tl.program_id(0) * W + k, y.to(out.dtype.element_ty), mask=k < W)


@triton.jit
def open_gate(z, SIGMOID: tl.constexpr):
    """silu(z), or sigmoid(z)."""
    return tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)


@triton.jit
def _gated_norm_kernel(
    x,  # [N, groups · W], x_stride between rows
    gate,  # [N / HEADS, HEADS, groups · W], strides gate_stride, gate_head, 1
    weight, out,  # [groups · W], [N, groups · W]
    W, x_stride, gate_stride, gate_head, eps,  # W: width of a group
    HEADS: tl.constexpr, BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, g): group g of row n, W values."""
    n, groups = tl.cast(tl.program_id(0), tl.int64), tl.num_programs(1)
    k = tl.arange(0, BLOCK)
    inside = k < W
    k += tl.program_id(1) * W
    scale = tl.load(weight + k, mask=inside, other=0).to(tl.float32)
    begin(PDL)
    y = tl.load(x + n * x_stride + k, mask=inside, other=0).to(tl.float32)
    gate += n // HEADS * gate_stride + n % HEADS * gate_head
    opening = open_gate(tl.load(gate + k, mask=inside, other=0).to(tl.float32), SIGMOID)
    if GATE_FIRST:
        y *= opening
    y *= tl.rsqrt(tl.sum(y * y) / W + eps) * scale
    if not GATE_FIRST:
        y *= opening
    tl.store(out + n * groups * W + k, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm_rows(
    x, gate,  # [N, W], x_stride between rows; [N / HEADS, HEADS, W], strides gate_stride, gate_head, 1
    weight, out,  # [W], [N, W]
    N, W, x_stride, gate_stride, gate_head, eps,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i): ROWS short rows, so that many of them are no more programs than a GPU starts in the time of reading
    them."""
    n, k = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (n < N)[:, None] & (k < W)[None, :]
    scale = tl.load(weight + k, mask=k < W, other=0).to(tl.float32)[None, :]
    begin(PDL)
    y = tl.load(x + n[:, None] * x_stride + k[None, :], mask=inside, other=0).to(tl.float32)
    place = (n // HEADS * gate_stride + n % HEADS * gate_head)[:, None] + k[None, :]
    opening = open_gate(tl.load(gate + place, mask=inside, other=0).to(tl.float32), SIGMOID)
    if GATE_FIRST:
        y *= opening
    y *= tl.rsqrt(tl.sum(y * y, 1) / W + eps)[:, None] * scale
    if not GATE_FIRST:
        y *= opening
    tl.store(out + n[:, None] * W + k[None, :], y.to(out.dtype.element_ty), mask=inside)
