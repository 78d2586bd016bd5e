"""Attention of few queries over dense keys, for models that `attend`: one new token, or a few.

On a CPU a single query goes to PyTorch's `scaled_dot_product_attention` at once. On a GPU that function gives such a
call to cuDNN, which plans a kernel for every new number of keys, and so for every token. The functions here have one
kernel for all lengths, and read each key once for all query heads that share it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lamina.attention.core import FEW
from lamina.attention.torch_backends import products

FLASH = (torch.float16, torch.bfloat16)


def attend_one(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
    """Attention [B, 1, Hq, D] of one query that sees every key, as in `by_products`; None for calls that are not of
    this kind. For larger heads transformers repeats keys, and so rounds differently.

    >>> attend_one(torch.ones(1, 4, 1, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), None).shape
    torch.Size([1, 1, 4, 8])
    """
    _, Hq, T, D = query.shape
    _, H, _, Dk = key.shape
    if T != 1 or not D == Dk == value.shape[3] <= 256:
        return None
    if query.is_cpu:
        found = scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=Hq != H)
        return found.transpose(1, 2).contiguous()
    if query.dtype in FLASH and D % 8 == 0 and suits(query, key, None):
        return flash(query, key, value, D**-0.5 if scale is None else scale)
    return None


def suits(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """True for few queries on a GPU of which it is known what each sees, with no gradients to record."""
    if not query.is_cuda:
        return False
    T, recorded = query.shape[2], torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    known = mask is not None or T == 1  # without a mask, a single query sees every key
    return T <= FEW and known and not recorded and not torch.compiler.is_compiling()


def flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """FlashAttention of one query over all keys. Arguments and result as in `by_products`, with T = 1."""
    B, Hq, _, D = query.shape
    H, S = key.shape[1], key.shape[2]
    # Query heads that share a key head are queries of that head, and each key head is a row of its own, [B·H, 1, N, D]:
    # the kernel stores results as [rows, N, heads, D], so with one head they are in order and need no copy.
    folded = query.reshape(B * H, 1, Hq // H, D)
    keys, values = (x.reshape(B * H, 1, S, D) for x in (key, value))
    out = torch._scaled_dot_product_flash_attention(folded, keys, values, 0.0, False, False, scale=scale)[0]
    return out.reshape(B, 1, Hq, D)


def by_products(
    query: Tensor,  # [B, Hq, T, D]
    key: Tensor,  # [B, H, S, D]
    value: Tensor,  # [B, H, S, Dv]
    mask: Tensor | None,  # [B, 1 or Hq, T, S]: True where a key is seen, or added to the scores; None: all are seen
    scale: float,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v, [B, T, Hq, Dv], by two matrix products and a softmax.

    >>> by_products(torch.ones(1, 4, 1, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), None, 1.0).shape
    torch.Size([1, 1, 4, 8])
    """
    B, Hq, T, D = query.shape
    H, S = key.shape[1], key.shape[2]
    folded = query.reshape(B, H, Hq // H * T, D)  # query heads that share a key head are queries of that head
    scores = products(folded, key).view(B, Hq, T, S) * scale  # at least float32
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    shares = scores.softmax(dim=-1)
    if mask is not None:  # a row of padding sees nothing: zeros, not NaN
        shares = shares.nan_to_num(0.0)
    return (shares.to(value.dtype).view(B, H, -1, S) @ value).view(B, Hq, T, -1).transpose(1, 2).contiguous()
