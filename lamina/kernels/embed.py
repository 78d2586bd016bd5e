"""The vectors of the tokens that a step is fed: rows of the embedding, times a factor.

The reference is `lamina.nn.Embedding`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.launch import begin, launch

BLOCK = 1024  # numbers of a program


@triton.jit
def _embed(ids, weight, out, W, scale, BLOCK: tl.constexpr, ROUNDED: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(weight + tl.load(ids + tl.program_id(0)) * W + k, mask=k < W, other=0).to(tl.float32)
    factor = tl.zeros([BLOCK], tl.float32) + scale
    if ROUNDED:
        factor = factor.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + tl.program_id(0) * W + k, (x * factor).to(out.dtype.element_ty), mask=k < W)


def embed(ids: Tensor, weight: Tensor, scale: float = 1.0, rounded: bool = False) -> Tensor:
    """ids [...] of int64, weight [V, W], contiguous -> [..., W]; `rounded`: the factor is rounded as the weights are"""
    width = weight.shape[1]
    out = weight.new_empty(*ids.shape, width)
    launch(
        _embed, (ids.numel(), triton.cdiv(width, BLOCK)),
        ids.contiguous(), weight, out, width, scale,
        BLOCK=BLOCK, ROUNDED=rounded, num_warps=4,
    )  # fmt: skip
    return out
