"""Causal attention of a few hundred queries on a CPU: block after block of queries, over the keys up to its end.

Each block is two matrix products of all its heads and a softmax between them. The query heads that share a key head are
rows of one product, and no product has more than one block of scores that are not visible. PyTorch's kernel multiplies
smaller tiles, one head at a time; it is as fast from some 800 queries on, where its tiles get larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.attention.core import OFFERS, Offer
from lamina.attention.reference import Bias
from lamina.attention.view import View

BLOCK = 64  # queries
LEAST, MOST = 128, 767  # queries of a row


def query_blocks(
    q: Tensor, k: Tensor, v: Tensor, view: View, *, scale: float, softcap: None = None, sinks: None = None,
    bias: None = None,
) -> Tensor:  # fmt: skip
    """q [B, Hq, T, D], k [B, Hk, S, D], v [B, Hk, S, Dv] -> [B, Hq, T, Dv]; queries are the last T of the S tokens."""
    (B, Hq, T, D), (Hk, S), Dv = q.shape, k.shape[1:3], v.shape[-1]
    out, scores = q.new_empty(B, T, Hq, Dv), q.new_empty(B * Hq * BLOCK * S)
    keys, values = k.transpose(2, 3).reshape(B * Hk, D, S), v.reshape(B * Hk, S, Dv)
    later = q.new_full((BLOCK, BLOCK), float("-inf")).triu_(1)
    for start in range(0, T, BLOCK):
        end = min(start + BLOCK, T)
        count, seen = end - start, S - T + end  # queries of this block, and keys up to the last of them
        some = q[:, :, start:end].reshape(B * Hk, -1, D)  # [B · Hk, G · count, D]
        found = scores[: B * Hq * count * seen].view(B * Hk, -1, seen)
        torch.baddbmm(found, some, keys[:, :, :seen], beta=0, alpha=scale, out=found)
        found.view(B * Hq, count, seen)[..., -count:].add_(later[:count, :count])
        torch.softmax(found, -1, out=found)
        out[:, start:end] = torch.bmm(found, values[:, :seen]).view(B, Hq, count, Dv).transpose(1, 2)
    return out.transpose(1, 2)


def fits(
    q: Tensor, k: Tensor, v: Tensor, view: View, softcap: float | None, sinks: Tensor | None, bias: Bias | None
) -> bool:
    if torch.compiler.is_compiling() or torch.is_grad_enabled():  # before sizes, which a traced program may vary
        return False
    if q.device.type != "cpu" or q.dtype != torch.float32 or not LEAST <= q.shape[2] <= MOST:
        return False
    if softcap is not None or sinks is not None or bias is not None or not view.positional:
        return False
    return view.exact and view.causal and view.window.spares(k.shape[2])


OFFERS["query blocks"] = Offer(query_blocks, fits)
