"""The PyTorch backends of `attention`: sdpa, eager and flex.

No backend repeats keys for grouped heads (GQA). The G query heads that share a key head are adjacent, so [B, Hq, T, D]
reshapes to [B, Hk, G * T, D], and one product per key head serves all of them. `is_causal` and FlexAttention depend on
the order of the queries, so these group heads themselves (`enable_gqa`). Masks come from the View. A query that sees no
key gives zeros in all three backends.
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
from lamina.errors import InputError
from lamina.tracing import cast

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
    """`scaled_dot_product_attention`: fused, never materializes all scores, and cannot modify them."""
    if softcap is not None or sinks is not None or bias is not None:
        raise InputError("backend 'sdpa' cannot change scores (softcap, sinks, bias): use 'eager' or 'flex'")
    lowered = view.lower()
    if isinstance(lowered, str):
        # is_causal depends on the order of the queries, so heads cannot be folded into them.
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
    """Attention without a mask. q [B, Hk, G * T, D], k [B, Hk, S, D], v [B, Hk, S, Dv]"""
    if torch.compiler.is_compiling() and _flex_is_faster(q):
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def _flex_is_faster(q: Tensor) -> bool:
    """Compiled for a CPU, FlexAttention is a loop specialized for these heads, which with few queries reads keys faster
    than PyTorch's kernel. It has no backward pass on the CPU."""
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
    """Attention weights of each query over the keys, [B, Hq, T, S], at least float32.

    They sum to 1 over the keys, to less with sinks, and to 0 for a query that sees no key.

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
        # The lowest finite value, not -inf: softmax over nothing but -inf is NaN, forward and backward.
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
    if q.is_cuda and q.dtype != exact:  # accumulate and return in float32, without rounding to q's dtype
        found = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), out_dtype=exact)
        return found.view(*q.shape[:3], -1)
    return cast(q @ k.transpose(-1, -2), exact)


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
    """Matrix products and softmax in plain PyTorch: can modify scores, at the price of materializing all of them."""
    return _weighted_sum(probabilities(q, k, view, scale=scale, softcap=softcap, sinks=sinks, bias=bias), v)


def _weighted_sum(shares: Tensor, v: Tensor) -> Tensor:
    """The sum of the values with these weights. shares [B, Hq, T, S], v [B, Hk, S, Dv] -> [B, Hq, T, Dv]"""
    B, Hq, T, S = shares.shape
    return (cast(shares, v.dtype).reshape(B, v.shape[1], -1, S) @ v).reshape(B, Hq, T, -1)


def recorder(keep: Callable[[Tensor, View], None]) -> Callable[..., Tensor]:
    """A backend like `eager` that also calls keep(probabilities, view)."""

    def run(q: Tensor, k: Tensor, v: Tensor, view: View, **how: Any) -> Tensor:
        shares = probabilities(q, k, view, **how)
        keep(shares, view)
        return _weighted_sum(shares, v)

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
    """FlexAttention: modifies scores inside the kernel and skips blocks that no query sees. Fused only under
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
    # exp(lse) / (exp(lse) + exp(sink)): the total weight of the keys in a softmax with the sink.
    share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])  # [B, Hq, T]
    return (out * share[..., None]).to(out.dtype)
