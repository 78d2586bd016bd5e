"""The reference: attention written like its formula, one query head at a time, in high precision.

Every backend is compared with this function. It always uses the boolean mask, never a lowered form of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.attention.view import View

Bias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""bias(head, q_pos, kv_pos) -> a value that is added to the score (T5's relative bias, ALiBi). Elementwise.

Called with integer tensors head [Hq, 1, 1], q_pos [B, 1, T, 1] and kv_pos [B, 1, 1, S], and must return a tensor that
broadcasts to [B, Hq, T, S]; the flex backend calls it with three 0-dim tensors and expects a 0-dim result. For a slot
without a token kv_pos is 0, and the bias is masked out."""


def dense_bias(bias: Bias, view: View, heads: int) -> Tensor:
    """The bias of every query and slot [B, Hq, T, S]. Layers that share a view and a bias compute it once."""
    if view.last_bias is not None and view.last_bias[0] is bias:
        return view.last_bias[1]
    B, T, S = view.shape
    head = torch.arange(heads, device=view.q_positions.device)[:, None, None]
    added = bias(head, view.q_positions[:, None, :, None], view.kv_positions.clamp(min=0)[:, None, None, :])
    view.last_bias = bias, added.expand(B, heads, T, S)
    return view.last_bias[1]


def reference_attention(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hk, S, D]
    v: Tensor,  # [B, Hk, S, Dv]
    view: View,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    bias: Bias | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """softmax(softcap(scale * q k^T) + bias) v over the keys that `view` shows, in `dtype`: [B, Hq, T, Dv].

    A sink is one logit per head that takes part in the softmax and has no value. A query that sees no key gives zeros.

    >>> import torch
    >>> from lamina.attention import Full, View
    >>> q, k, v = torch.ones(1, 4, 2, 8), torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 3)
    >>> at = torch.arange(2)[None]
    >>> reference_attention(q, k, v, View(at, at, Full()), scale=1.0).shape
    torch.Size([1, 4, 2, 3])
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    visible = view.mask()[:, 0]  # [B, T, S]
    zero = torch.zeros((), dtype=dtype, device=q.device)
    q = q.to(dtype)
    k = torch.where(view.exists(), k.to(dtype), zero)
    v = torch.where(view.exists(), v.to(dtype), zero)
    added = None if bias is None else dense_bias(bias, view, heads).to(dtype)
    outputs = []
    for h in range(heads):
        scores = torch.einsum("btd,bsd->bts", q[:, h], k[:, h // group]) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if added is not None:
            scores = scores + added[:, h]
        # The sink is one more key without a value; -inf where the model has no sinks.
        sink = scores.new_full((), -torch.inf) if sinks is None else sinks[h].to(dtype)
        shares = torch.where(visible, scores, -torch.inf)
        shares = torch.cat([shares, sink.expand(*scores.shape[:2], 1)], dim=-1)  # [B, T, S + 1]
        largest = shares.amax(dim=-1, keepdim=True)
        shares = torch.exp(shares - torch.where(largest == -torch.inf, zero, largest))
        total = shares.sum(dim=-1, keepdim=True)
        weights = shares[:, :, :-1] / torch.where(total == 0, torch.ones_like(total), total)
        outputs.append(torch.einsum("bts,bsd->btd", weights, v[:, h // group]))
    return torch.stack(outputs, dim=1)
