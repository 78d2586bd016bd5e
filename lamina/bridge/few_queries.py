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
    """On a CPU, `attend_few` of one query that sees every key; None for other calls. For larger heads transformers
    repeats keys, and so rounds differently.

    >>> attend_one(torch.ones(1, 4, 1, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), None).shape
    torch.Size([1, 1, 4, 8])
    """
    _, Hq, T, D = query.shape
    _, H, _, Dk = key.shape
    if T != 1 or not query.is_cpu or not D == Dk == value.shape[3] <= 256:
        return None
    found = scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=Hq != H)
    return found.transpose(1, 2).contiguous()


def suits(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """True if `attend_few` is the way for this call: few queries on a GPU, of which each sees what the mask says."""
    if not query.is_cuda:
        return False
    T, recorded = query.shape[2], torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    known = mask is not None or T == 1  # without a mask, a single query sees every key
    return T <= FEW and known and not recorded and not torch.compiler.is_compiling()


def attend_few(
    query: Tensor,  # [B, Hq, T, D]
    key: Tensor,  # [B, H, S, D]
    value: Tensor,  # [B, H, S, Dv]
    mask: Tensor | None,  # [B, 1 or Hq, T, S]: True where a key is seen, or added to the scores; None: all are seen
    scale: float,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v, [B, T, Hq, Dv].

    >>> attend_few(torch.ones(1, 4, 1, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), None, 1.0).shape
    torch.Size([1, 1, 4, 8])
    """
    D = query.shape[-1]
    if mask is None and query.is_cuda and query.dtype in FLASH and D == value.shape[-1] <= 256 and D % 8 == 0:
        return flash(query, key, value, scale)
    return by_products(query, key, value, mask, scale)


def flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """FlashAttention of one query over all keys. Arguments and result as in `attend_few`, with T = 1."""
    B, Hq, _, D = query.shape
    H, S = key.shape[1], key.shape[2]
    # Query heads that share a key head are queries of that head, and each key head is a row of its own, [B·H, 1, N, D]:
    # the kernel stores results as [rows, N, heads, D], so with one head they are in order and need no copy.
    folded = query.reshape(B * H, 1, Hq // H, D)
    keys, values = (x.reshape(B * H, 1, S, D) for x in (key, value))
    out = torch._scaled_dot_product_flash_attention(folded, keys, values, 0.0, False, False, scale=scale)[0]
    return out.reshape(B, 1, Hq, D)


def by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Two matrix products and a softmax. Arguments and result as in `attend_few`."""
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
