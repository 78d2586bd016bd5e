"""RMS norms of many short vectors or few long ones: one program normalises one vector, read once.

rms_norm          x / rms(x) · weight, with an optional residual added after it, as `lamina.nn.RMSNorm`
rms_norm_twice    the same, and the norm of the sum beside it
gated_rms_norm    norm(x · silu(gate)) or norm(x) · silu(gate), in groups, as `lamina.nn.GatedRMSNorm`
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
    """residual + norm(x), rounded once, to `dtype` or that of x; with `plus_one` the factor is 1 + weight.

    x [N, W] or [N, H, W] of any strides with W contiguous, weight [W], residual as x but contiguous -> as x, contiguous
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
    """y = residual + norm(x), and another norm of y. x and residual [N, W], contiguous, weights [W] -> [N, W] each"""
    rows, width = x.shape
    out, normed = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    launch(
        _norm_kernel, (1, rows),
        x, weights[0], residual, out, weights[1], normed, width, 0, x.stride(0), *eps,
        BLOCK=triton.next_power_of_2(width), WEIGHT=True, PLUS_ONE=plus_one, RESIDUAL=True, TWICE=True,
        num_warps=_warps(width),
    )  # fmt: skip
    return out, normed


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate), both [B, H, T, D] with the numbers of all heads of a token side by side -> as x"""
    B, H, T, D = x.shape
    numbers = H * D
    out = torch.empty(B, T, H, D, dtype=x.dtype, device=x.device)
    launch(
        _gate_kernel, (B * T, triton.cdiv(numbers, 1024)),
        x, gate, out, x.stride(0), x.stride(2), gate.stride(0), gate.stride(2), numbers,
        T=T, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int = 1, gate_first: bool = True
) -> Tensor:
    """x [N, W] and gate [N, W] or [N / H, H, W] with W contiguous, weight [W] -> [N, W] in the gate's dtype."""
    rows, width = x.shape
    group = width // groups
    out = gate.new_empty(rows, width)
    gate = gate[:, None] if gate.dim() == 2 else gate
    launch(
        _gated_norm_kernel, (rows, groups),
        x, gate, weight, out, group, x.stride(0), *gate.stride()[:2], eps, HEADS=gate.shape[1],
        BLOCK=triton.next_power_of_2(group), GATE_FIRST=gate_first,
        num_warps=_warps(group),
    )  # fmt: skip
    return out


def _warps(width: int) -> int:
    """Eight numbers for each thread, up to the most threads that pay."""
    return min(16, max(1, triton.next_power_of_2(width) // 256))


@triton.jit
def _norm_kernel(
    x, weight, residual, out, next_weight, next_out, W, stride_n, stride_h, eps, next_eps, BLOCK: tl.constexpr,
    WEIGHT: tl.constexpr, PLUS_ONE: tl.constexpr, RESIDUAL: tl.constexpr, TWICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, h = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    inside = k < W
    here = (n * tl.num_programs(1) + h) * W + k
    plus = 1.0 if PLUS_ONE else 0.0
    # All that is needed is asked for at once, and weights, which no kernel writes, before the wait for the one before.
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
def _gate_kernel(
    x, gate, out, x_row, x_token, gate_row, gate_token, W, T: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    row, t = tl.program_id(0) // T, tl.program_id(0) % T
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + row * x_row + t * x_token + k, mask=k < W, other=0).to(tl.float32)
    y *= tl.sigmoid(tl.load(gate + row * gate_row + t * gate_token + k, mask=k < W, other=0).to(tl.float32))
    tl.store(out + tl.program_id(0) * W + k, y.to(out.dtype.element_ty), mask=k < W)


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, W, x_stride, gate_stride, gate_head, eps, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, g): the W numbers of group g of row n."""
    n, groups = tl.cast(tl.program_id(0), tl.int64), tl.num_programs(1)
    k = tl.arange(0, BLOCK)
    inside = k < W
    k += tl.program_id(1) * W
    scale = tl.load(weight + k, mask=inside, other=0).to(tl.float32)
    begin(PDL)
    y = tl.load(x + n * x_stride + k, mask=inside, other=0).to(tl.float32)
    gate += n // HEADS * gate_stride + n % HEADS * gate_head
    opening = tl.load(gate + k, mask=inside, other=0).to(tl.float32)
    opening *= tl.sigmoid(opening)
    if GATE_FIRST:
        y *= opening
    y *= tl.rsqrt(tl.sum(y * y) / W + eps) * scale
    if not GATE_FIRST:
        y *= opening
    tl.store(out + n * groups * W + k, y.to(out.dtype.element_ty), mask=inside)
