"""RMS norms of many short vectors or few long ones: one program normalises one vector, read once.

rms_norm          x / rms(x) · weight, with an optional residual added after it, as `lamina.nn.RMSNorm`
gated_rms_norm    norm(x · silu(gate)) or norm(x) · silu(gate), in groups, as `lamina.nn.GatedRMSNorm`
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.launch import begin, launch_options, pdl


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
    _norm_kernel[(x.shape[0], x.shape[1])](
        x, x if weight is None else weight, x if residual is None else residual, out,
        width, x.stride(0), x.stride(1), eps,
        BLOCK=triton.next_power_of_2(width), WEIGHT=weight is not None, PLUS_ONE=plus_one,
        RESIDUAL=residual is not None, PDL=pdl(), num_warps=_warps(width), **launch_options(),
    )  # fmt: skip
    return out.view(shape)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int = 1, gate_first: bool = True
) -> Tensor:
    """x [N, W] and gate [N, W] with W contiguous, weight [W] -> [N, W] in the gate's dtype."""
    rows, width = x.shape
    group = width // groups
    out = gate.new_empty(gate.shape)
    _gated_norm_kernel[(rows, groups)](
        x, gate, weight, out, group, x.stride(0), gate.stride(0), eps,
        BLOCK=triton.next_power_of_2(group), GATE_FIRST=gate_first, PDL=pdl(),
        num_warps=_warps(group), **launch_options(),
    )  # fmt: skip
    return out


def _warps(width: int) -> int:
    """Eight numbers for each thread, up to the most threads that pay."""
    return min(16, max(1, triton.next_power_of_2(width) // 256))


@triton.jit
def _norm_kernel(
    x, weight, residual, out, W, stride_n, stride_h, eps, BLOCK: tl.constexpr, WEIGHT: tl.constexpr,
    PLUS_ONE: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n, h = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    inside = k < W
    y = tl.load(x + tl.cast(n, tl.int64) * stride_n + h * stride_h + k, mask=inside, other=0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(y * y) / W + eps)
    y *= factor
    if WEIGHT:
        y *= tl.load(weight + k, mask=inside, other=0).to(tl.float32) + (1.0 if PLUS_ONE else 0.0)
    here = (tl.cast(n, tl.int64) * tl.num_programs(1) + h) * W + k
    if RESIDUAL:
        y += tl.load(residual + here, mask=inside, other=0).to(tl.float32)
    tl.store(out + here, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, W, x_stride, gate_stride, eps, BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, g): the W numbers of group g of row n."""
    begin(PDL)
    n, groups = tl.cast(tl.program_id(0), tl.int64), tl.num_programs(1)
    k = tl.arange(0, BLOCK)
    inside = k < W
    k += tl.program_id(1) * W
    y = tl.load(x + n * x_stride + k, mask=inside, other=0).to(tl.float32)
    opening = tl.load(gate + n * gate_stride + k, mask=inside, other=0).to(tl.float32)
    opening *= tl.sigmoid(opening)
    if GATE_FIRST:
        y *= opening
    y *= tl.rsqrt(tl.sum(y * y) / W + eps)
    y *= tl.load(weight + k, mask=inside, other=0).to(tl.float32)
    if not GATE_FIRST:
        y *= opening
    tl.store(out + n * groups * W + k, y.to(out.dtype.element_ty), mask=inside)
