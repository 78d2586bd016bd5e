"""Embedding lookup: the rows of the embedding matrix for the tokens of a step, times a factor, added to other values.

The reference is `lamina.nn.Embedding`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.launch import begin, launch

BLOCK = 1024  # values per program


@triton.jit
def _embed(
    ids, weight, residual, out, W, scale,  # int64 [N], [V, W], [N, W] twice; residual is read if RESIDUAL
    BLOCK: tl.constexpr, ROUNDED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, i): values i · BLOCK … of the token's row."""
    begin(PDL)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(weight + tl.load(ids + tl.program_id(0)) * W + k, mask=k < W, other=0).to(tl.float32)
    factor = tl.zeros([BLOCK], tl.float32) + scale
    if ROUNDED:
        factor = factor.to(out.dtype.element_ty).to(tl.float32)
    here = tl.program_id(0) * W + k
    x *= factor
    if RESIDUAL:
        x += tl.load(residual + here, mask=k < W, other=0).to(tl.float32)
    tl.store(out + here, x.to(out.dtype.element_ty), mask=k < W)


def embed(
    ids: Tensor, weight: Tensor, scale: float = 1.0, rounded: bool = False, residual: Tensor | None = None
) -> Tensor:
    """ids int64 [...], weight [V, W], residual [..., W] -> residual + scale · weight[ids], [..., W]

    rounded   the factor is rounded to the weight's dtype
    """
    width = weight.shape[1]
    out = weight.new_empty(*ids.shape, width, dtype=None if residual is None else residual.dtype)
    launch(
        _embed, (ids.numel(), triton.cdiv(width, BLOCK)),
        ids.contiguous(), weight, out if residual is None else residual.contiguous(), out, width, scale,
        BLOCK=BLOCK, ROUNDED=rounded, RESIDUAL=residual is not None, num_warps=4,
    )  # fmt: skip
    return out
