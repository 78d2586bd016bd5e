"""The PyTorch backends of `attention`: sdpa, eager and flex.

No backend repeats keys for grouped heads. The G query heads that share a key head lie next to each other, so
[B, Hq, T, D] folds to [B, Hk, G * T, D] and one product per key head serves them all; only `is_causal` and
FlexAttention, which count queries in order, are left to group heads themselves (`enable_gqa`). Where a mask
is needed it is the View's. A query that sees nothing gives zeros in all three.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.attention.reference import Bias, dense_bias
from lamina.attention.view import View

FLEX_ON_CPU, MOST_QUERIES = (torch.float32, torch.bfloat16, torch.float16), 64


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: View,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """`scaled_dot_product_attention`: fused, never holds all scores at once, and cannot change them."""
    if softcap is not None or sinks is not None or bias is not None:
        raise ValueError("backend 'sdpa' cannot change scores (softcap, sinks, bias): use 'eager' or 'flex'")
    lowered = view.lower()
    if isinstance(lowered, str):
        # is_causal counts queries in order, so they cannot be folded.
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    B, Hq, T, _ = q.shape
    Hk = k.shape[1]
    folded = q.reshape(B, Hk, -1, q.shape[-1])  # [B, Hk, G * T, D]
    if lowered is None:
        return _of_all(folded, k, v, scale).reshape(B, Hq, T, -1)
    mask = lowered if view.sighted else view.opened()  # [B, 1, T, S]
    if T > 1 and Hq != Hk:
        mask = mask.repeat(1, 1, Hq // Hk, 1)  # [B, 1, G * T, S]
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale).reshape(B, Hq, T, -1)
    return out if view.sighted else out.masked_fill(view.blind(), 0)


def _of_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of queries that see every key."""
    if torch.compiler.is_compiling() and _flex_is_faster(q):
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def _flex_is_faster(q: Tensor) -> bool:
    """Compiled for a CPU, FlexAttention is a loop written for these heads: with few queries it reads keys faster than
    the library's kernel. It has no backward pass there."""
    if q.device.type != "cpu" or q.dtype not in FLEX_ON_CPU or q.requires_grad:
        return False
    return q.shape[2] <= MOST_QUERIES and not torch.compiler.is_exporting()


def probabilities(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hk, S, D]
    view: View,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """How much each query takes of each key, [B, Hq, T, S], at least float32.

    A line sums to 1, to less where there are sinks, to 0 where the query sees nothing.

    >>> import torch
    >>> from lamina.attention import Full, View
    >>> at = torch.arange(2)[None]
    >>> probabilities(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), View(at, at, Full()), scale=1.0)[0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    B, Hq, T, D = q.shape
    Hk, S = k.shape[1], k.shape[2]
    scores = products(q.reshape(B, Hk, -1, D), k).view(B, Hq, T, S) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + dense_bias(bias, view, Hq)
    mask = None if view.lower() is None else view.mask()
    if mask is not None:
        # The lowest finite number, not -inf: a line of -inf is NaN, forward and backward.
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    if sinks is None:
        shares = scores.softmax(dim=-1)
    else:
        sink = sinks.to(scores.dtype).view(1, Hq, 1, 1).expand(B, Hq, T, 1)
        shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return shares if mask is None or view.sighted else torch.where(mask, shares, 0.0)


def products(q: Tensor, k: Tensor) -> Tensor:
    """q [B, H, N, D], k [B, H, S, D] -> q kᵀ [B, H, N, S], at least float32"""
    exact = torch.promote_types(q.dtype, torch.float32)
    if q.is_cuda and q.dtype != exact:  # not rounded on the way
        found = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), out_dtype=exact)
        return found.view(*q.shape[:3], -1)
    return (q @ k.transpose(-1, -2)).to(exact)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: View,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """Products and softmax by hand: anything can be done to the scores, at the price of holding them all."""
    return _taken(probabilities(q, k, view, scale=scale, softcap=softcap, sinks=sinks, bias=bias), v)


def _taken(shares: Tensor, v: Tensor) -> Tensor:
    """The values in these shares. shares [B, Hq, T, S], v [B, Hk, S, Dv] -> [B, Hq, T, Dv]"""
    B, Hq, T, S = shares.shape
    return (shares.to(v.dtype).reshape(B, v.shape[1], -1, S) @ v).reshape(B, Hq, T, -1)


def recording(keep: Callable[[Tensor, View], None]) -> Callable[..., Tensor]:
    """A backend like `eager` that also hands over its `probabilities`, and the view they are of."""

    def run(q: Tensor, k: Tensor, v: Tensor, view: View, **how: Any) -> Tensor:
        shares = probabilities(q, k, view, **how)
        keep(shares, view)
        return _taken(shares, v)

    return run


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: View,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """FlexAttention: scores are changed inside the kernel and unseen blocks skipped. Fused only under
    `torch.compile`."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    q_positions, kv_positions = view.q_positions, view.kv_positions.clamp(min=0)

    def change(score: Tensor, row: Tensor, head: Tensor, t: Tensor, s: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias(head, q_positions[row, t], kv_positions[row, s])
        return score

    run = partial(
        flex_attention,
        q,
        k,
        v,
        score_mod=None if softcap is None and bias is None else change,
        block_mask=None if view.lower() is None else view.block_mask(),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if sinks is None:
        return run()
    out, aux = run(return_aux=AuxRequest(lse=True))
    # exp(lse) / (exp(lse) + exp(sink)): the part of the softmax that the sink leaves over.
    left = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])  # [B, Hq, T]
    return (out * left[..., None]).to(out.dtype)
