"""Linear layers and embeddings over packed weights, by kernels: what the modules of `lamina.nn` call.

linear_step     one launch for each part of the weight that has a format of its own
gated_step      gate and up in one launch
embed_step      rows of an embedding
plain_product   x Wᵀ in plain passes, for any number of vectors
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.kernels.gemm.deferred_norm import operand
from lamina.kernels.gemm.inline_norm import Inlined
from lamina.kernels.gemm.product import MOST
from lamina.kernels.packed.dequantize import dequantize
from lamina.kernels.packed.embed import packed_embed
from lamina.kernels.packed.matrix import PackedMatrix
from lamina.kernels.packed.product import packed_gated, packed_product
from lamina.kernels.packed.serve import matrix_of, why_unread
from lamina.weights.packed import Packed, PackedWeight

SOME = 256  # vectors up to which launches for 64 at a time are faster than dequantizing the weight
AT_ONCE = 1 << 27  # values that are dequantized together


def vectors_of(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """The vectors [N, K] that a product reads, and its arguments for a norm that was left to it."""
    x, squares, eps = operand(x.launched() if isinstance(x, Inlined) else x)
    return x.reshape(-1, x.shape[-1]), {"squares": squares, "eps": eps}


def linear_step(x: Tensor, weight: Packed, *, residual: Tensor | None = None, **around: Any) -> Tensor:
    """x [..., K], weight [M, K], residual [..., M] -> [..., M]; `around` as for `packed_product`, without its norms.

    next_norm must be None unless the weight is of one format.
    """
    flat, norm = vectors_of(x)
    residual = None if residual is None else residual.reshape(-1, residual.shape[-1])
    segments = weight.segments
    if len(segments) == 1:
        y = _product(flat, segments[0], residual=residual, **norm, **around)
        return y.view(*x.shape[:-1], -1)
    y, start = flat.new_empty(flat.shape[0], weight.shape[0], dtype=None if residual is None else residual.dtype), 0
    for segment in segments:
        end = start + segment.shape[0]
        own = dict(around, out=y[:, start:end], residual=None if residual is None else residual[:, start:end])
        for name in ("bias", "scale"):
            if isinstance(whole := around.get(name), Tensor):
                own[name] = whole[start:end]
        _product(flat, segment, **norm, **own)
        start = end
    return y.view(*x.shape[:-1], -1)


def _product(flat: Tensor, weight: PackedWeight, **how: Any) -> Tensor:
    return packed_product(_ordered(flat, weight), matrix_of(weight), **how)


def _ordered(flat: Tensor, weight: PackedWeight) -> Tensor:
    order = weight.parts.get("order")
    return flat if order is None else flat.index_select(1, order)


def gated_step(x: Tensor, weight: Packed, **how: Any) -> Tensor | None:
    """act(gate) · up [..., I] for a weight [2I, K]; None if gate and up differ in their formats."""
    if len(weight.segments) > 1:
        return None
    flat, norm = vectors_of(x)
    only = weight.segments[0]
    return packed_gated(_ordered(flat, only), matrix_of(only), **norm, **how).view(*x.shape[:-1], -1)


def embed_step(ids: Tensor, weight: Packed, scale: float, rounded: bool, onto: Tensor | None) -> Tensor:
    """Rows of an embedding of one format: ids [...] -> [..., K]"""
    return packed_embed(ids, matrix_of(weight.segments[0]), weight.dtype, scale, rounded, onto)


def plain_product(x: Tensor, weight: PackedWeight) -> Tensor | None:
    """x [N, K] -> x Wᵀ [N, M]: by the kernels for up to SOME vectors, then by dequantizing the weight, which is read
    once for all vectors. None if no kernel reads the weight."""
    if why_unread(weight) is not None:
        return None
    x, matrix = _ordered(x, weight), matrix_of(weight)
    if x.shape[0] <= SOME:
        if x.shape[0] <= MOST:
            return packed_product(x, matrix)
        y = x.new_empty(x.shape[0], weight.shape[0])
        for part, out in zip(x.split(MOST), y.split(MOST), strict=True):
            packed_product(part, matrix, out=out)
        return y
    return many_product(x, matrix)


def many_product(x: Tensor, weight: PackedMatrix) -> Tensor:
    """x [N, K], weight [M, K] -> x Wᵀ [N, M] by the library's product, with the weight, or the rows of it that
    AT_ONCE allows at a time, dequantized to scratch memory."""
    m, k = weight.shape
    size = max(AT_ONCE // k // 128, 1) * 128
    if m <= size:
        return F.linear(x, dequantize(weight, torch.empty(m, k, dtype=x.dtype, device=x.device)))
    y = x.new_empty(x.shape[0], m)
    scratch = torch.empty(size, k, dtype=x.dtype, device=x.device)
    for start in range(0, m, size):
        part = weight.rows(start, min(start + size, m))
        values = dequantize(part, scratch[: part.shape[0]])
        torch.mm(x, values.t(), out=y[:, start : start + part.shape[0]])
    return y
