"""Routers: which experts a token visits, and how much each of them counts.

A router gives every expert a logit. `Choice` is the rule from logits to experts and weights, which is where families
differ; `Router` holds the matrix that makes the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lamina import kernels
from lamina.nn.initial import random_weight
from lamina.nn.linear import linear


@dataclass(frozen=True)
class Choice:
    """A token visits the experts of the highest merit: score + bias or, where there is no bias, the logit itself, whose
    order is that of the scores. Its weights are the scores alone.

    each          how many experts a token visits
    score         softmax over all experts, or a sigmoid for each
    normed        weights of a token add up to one
    factor        on weights
    groups        experts lie in so many groups, one after the other
    groups_each   experts come from that many groups, those with the highest merit of their two best together

    >>> Choice(each=2, normed=True).of(torch.tensor([2.0, 1.0, 2.0, 0.0]))
    (tensor([0, 2]), tensor([0.5000, 0.5000]))
    """

    each: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normed: bool = False
    factor: float = 1.0
    groups: int = 1
    groups_each: int = 1

    def of(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [..., E], bias [E] -> the experts of each token and their weights, [..., each] both, the best first"""
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = exact.softmax(-1) if self.score == "softmax" else exact.sigmoid()
        merit = logits if bias is None else scores + bias
        if self.groups > 1:
            members = merit.unflatten(-1, (self.groups, -1))  # [..., groups, experts of a group]
            best = members.topk(2, dim=-1).values.sum(-1).topk(self.groups_each, dim=-1).indices
            shut = torch.ones_like(members[..., 0], dtype=torch.bool).scatter(-1, best, False)
            merit = members.masked_fill(shut[..., None], float("-inf")).flatten(-2)
        chosen = merit.topk(self.each, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, (weights * self.factor).to(logits.dtype)


class Router(nn.Module):
    """A row of `weight` for each expert.

    opens      one more row, whose sigmoid says how far the shared expert is open
    balanced   a bias, which balances the load in training and has a say in the choice alone
    exact      weight and bias stay in float32 in a model of any dtype
    """

    def __init__(
        self,
        width: int,
        experts: int,
        choice: Choice,
        *,
        opens: bool = False,
        balanced: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.choice, self.opens = choice, opens
        self.keep_float32 = ("weight", "bias") if exact else ()
        self.weight = random_weight(experts + opens, width)
        self.bias = nn.Parameter(torch.zeros(experts)) if balanced else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [..., W] -> the experts of each token and their weights, [..., each] both, and how far the shared expert is
        open, [..., 1]"""
        if kernels.on():
            return self._by_kernel(x)
        logits = linear(x.to(self.weight.dtype), self.weight)
        if not self.opens:
            return *self.choice.of(logits, self.bias), None
        logits, last = logits[..., :-1], logits[..., -1:]
        return *self.choice.of(logits, self.bias), last.sigmoid()

    def _by_kernel(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        from lamina.kernels.gemm.deferred_norm import operand  # imports Triton
        from lamina.kernels.gemm.router import route

        x, squares, eps = operand(x)
        flat = x.reshape(-1, x.shape[-1])
        found = route(flat, self.weight, self.choice, self.bias, opens=self.opens, squares=squares, eps=eps)
        chosen, weights, opening = (None if one is None else one.view(*x.shape[:-1], -1) for one in found)
        assert chosen is not None and weights is not None
        return chosen, weights, opening
