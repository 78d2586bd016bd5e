"""A lightning indexer: selects for each query the tokens with the highest scores. Attention is restricted to these.

    score(t, s) = Σ over heads h of weight(t, h) · relu(q(t, h) · k(s))

https://arxiv.org/abs/2512.02556
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 1 << 26  # products of one head, query and token in memory at once


def select_tokens(
    q: Tensor,  # [B, H, T, D]
    k: Tensor,  # [B, S, D]
    weights: Tensor,  # [B, T, H]
    seen: Tensor,  # [B, T, S] which tokens each query sees
    top: int,
) -> Tensor:
    """The `top` tokens with the highest scores among those that a query sees, or all if it sees fewer -> [B, T, S]

    Products are computed for as many queries at a time as `MOST` allows.
    """
    (B, H, T, _), S = q.shape, k.shape[1]
    size = max(1, MOST // max(B * H * S, 1))
    if torch.compiler.is_exporting():  # a loop would fix the number of queries
        return best(index_scores(q, k, weights), seen, top)
    parts = []
    for start in range(0, T, size):
        here = slice(start, start + size)
        parts.append(best(index_scores(q[:, :, here], k, weights[:, here]), seen[:, here], top))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """q [B, H, T, D], k [B, S, D], weights [B, T, H] -> [B, T, S], in float32 or better"""
    exact = torch.promote_types(q.dtype, torch.float32)
    products = q.transpose(1, 2).to(exact) @ k.to(exact)[:, None].transpose(-1, -2)  # [B, T, H, S]
    return (weights.to(exact)[:, :, None] @ products.relu())[:, :, 0]


def best(scores: Tensor, seen: Tensor, top: int) -> Tensor:
    """Where the `top` highest scores are among those that are seen, [B, T, S]; of equal ones the first.

    >>> scores, seen = torch.tensor([[[1.0, 3.0, 1.0, 9.0]]]), torch.tensor([[[True, True, True, False]]])
    >>> best(scores, seen, 2).tolist()
    [[[True, True, False, False]]]
    """
    if top >= scores.shape[-1]:
        return seen
    scores = scores.masked_fill(~seen, float("-inf"))
    least = scores.topk(top, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores > least, (scores == least) & seen
    room = top - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= room))
