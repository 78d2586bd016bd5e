"""What stands between the products of a pass of many tokens: gates of MLPs, sums of experts, norm and RoPE of heads.

gated          act(gate) · up of the two halves of a product, as `Gating`
expert_sum     the weighted sum of a token's experts, whose outputs are sorted by expert, as `Experts.by_expert`
scale_columns  a product times one factor for each output, in place
rotate_heads   norm and RoPE of queries or keys, as `norm_and_rotate` of lamina/cache/plain_backend.py

Each value is read once and written once. Captured steps do these inside other kernels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from lamina.activation import Gating
from lamina.kernels.attention.rope_append import norm_and_rotate
from lamina.kernels.gemm.epilogue import act_kind, joined
from lamina.kernels.launch import begin, launch

if TYPE_CHECKING:
    from lamina.nn.norm import RMSNorm

VALUES = 4096  # of a program of four warps that rotates heads


def gated(x: Tensor, gating: Gating, scale: float = 1.0) -> Tensor:
    """gating(scale · gate, up) of x [..., 2 · I], gates first -> [..., I]"""
    flat, inner = x.reshape(-1, x.shape[-1]), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], inner)
    block = min(1024, triton.next_power_of_2(inner))
    launch(
        _gated_halves, (flat.shape[0], triton.cdiv(inner, block)),
        out, flat, inner, flat.stride(0), scale, BLOCK=block, ACT=act_kind(gating.act), LIMIT=gating.limit or 0.0,
        PLUS=gating.plus, SLOPE=gating.slope, num_warps=max(1, block // 256),
    )  # fmt: skip
    return out


@triton.jit
def _gated_halves(
    out, x,  # [N, I], [N, 2I]
    inner, x_stride, scale, BLOCK: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, PLUS: tl.constexpr,
    SLOPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, i): values i · BLOCK … + BLOCK of vector n."""
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < inner
    gate = tl.load(x + n * x_stride + i, mask=inside, other=0.0).to(tl.float32) * scale
    up = tl.load(x + n * x_stride + inner + i, mask=inside, other=0.0).to(tl.float32)
    y = joined(gate, up, ACT, True, LIMIT, PLUS, SLOPE)
    tl.store(out + n * inner + i, y.to(out.dtype.element_ty), mask=inside)


def scale_columns(y: Tensor, scale: Tensor) -> Tensor:
    """y · scale in place: y [..., W] contiguous, scale float32 [W]; rounded once"""
    width = y.shape[-1]
    block = min(1024, triton.next_power_of_2(width))
    launch(
        _scale_columns, (y.numel() // max(width, 1), triton.cdiv(width, block)),
        y, scale, width, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return y


@triton.jit
def _scale_columns(y, scale, W, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (n, i): values i · BLOCK … + BLOCK of vector n of y [N, W]."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(scale + i, mask=i < W, other=0.0).to(tl.float32)
    begin(PDL)
    at = y + tl.program_id(0).to(tl.int64) * W + i
    tl.store(at, (tl.load(at, mask=i < W, other=0.0).to(tl.float32) * factor).to(y.dtype.element_ty), mask=i < W)


def expert_sum(x: Tensor, outputs: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Σ_k weights[n, k] · outputs[places[n, k]] -> [N, W], in the dtype of x [N, W]

    outputs   [P, W] of pairs of a token and an expert
    places    [N, K] of a token's pairs in `outputs`; from P on: the expert returns x[n]
    weights   [N, K]; None: all one
    """
    (tokens, width), each = x.shape, places.shape[1]
    out = x.new_empty(tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    launch(
        _expert_sum, (tokens, triton.cdiv(width, block)),
        out, x, outputs, places, places if weights is None else weights, width, outputs.shape[0], x.stride(0),
        EACH=each, WEIGHTS=weights is not None, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return out


@triton.jit
def _expert_sum(
    out, x, outputs, places, weights,  # [N, W], [N, W], [P, W], [N, EACH] twice
    W, P, x_stride, EACH: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, i): values i · BLOCK … + BLOCK of token n. A place from P on means that the expert returns x."""
    begin(PDL)
    n = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < W
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(EACH):
        place = tl.load(places + n * EACH + k).to(tl.int64)
        at = tl.where(place < P, outputs + place * W, x + n * x_stride)
        y = tl.load(at + i, mask=inside, other=0.0).to(tl.float32)
        total += y * tl.load(weights + n * EACH + k).to(tl.float32) if WEIGHTS else y
    tl.store(out + n * W + i, total.to(out.dtype.element_ty), mask=inside)


def rotate_heads(
    x: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    *,
    neighbours: bool = False,
    norm: RMSNorm | None = None,
    norms_last: bool = False,
    factor: Tensor | None = None,
) -> Tensor:
    """Heads x [B, H, T, D] after norm and RoPE, times factor [B, T]: a view of a new tensor [B, T, H, D].

    rope   cos and sin, float32 [B or 1, T, P] each: the first 2 P values of a head are rotated; None: none are
    """
    B, H, T, D = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(B, T, H, D)
    cos, sin = (x, x) if rope is None else (part.expand(B, -1, -1) for part in rope)
    wide = max(16, triton.next_power_of_2(D))
    heads = min(triton.next_power_of_2(H), max(1, VALUES // wide))
    weight = x if norm is None or norm.weight is None else norm.weight
    launch(
        _rotate_heads, (B * T, triton.cdiv(H, heads)),
        out, x, cos, sin, weight, x if factor is None else factor, T, H, *x.stride()[:3],
        *((0, 0) if rope is None else cos.stride()[:2]), *((0, 0) if factor is None else factor.stride()),
        0.0 if norm is None else norm.eps, 0.0 if norm is None else float(norm.plus_one),
        HEADS=heads, D=D, D_PAD=wide, PAIRS=0 if rope is None else cos.shape[-1], NEIGHBOURS=neighbours,
        NORMS="" if norm is None else "last" if norms_last else "first",
        WEIGHTS=norm is not None and norm.weight is not None, FACTOR=factor is not None, num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)


@triton.jit
def _rotate_heads(
    out, x, cos, sin, weight, factor,  # [B, T, H, D], [B, H, T, D], [B, T, PAIRS] twice, [D], [B, T]
    T, H, x_row, x_head, x_token, rope_row, rope_token, factor_row, factor_token, eps, plus,  # strides; of the norm
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr,
    NORMS: tl.constexpr, WEIGHTS: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, i): heads i · HEADS … + HEADS of a token, which share its angles."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    row, t = token // T, token % T
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, D_PAD)
    angles = row * rope_row + t * rope_token
    y = norm_and_rotate(
        x + row * x_row + t * x_token + h.to(tl.int64) * x_head, h < H, weight, eps, plus, cos + angles, sin + angles,
        d, D, PAIRS, NEIGHBOURS, NORMS, WEIGHTS,
    )  # fmt: skip
    if FACTOR:
        y *= tl.load(factor + row * factor_row + t * factor_token).to(tl.float32)
    place = out + (token * H + h) * D + d[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=(h < H) & (d < D)[None, :])
