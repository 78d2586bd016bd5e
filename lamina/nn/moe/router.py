"""Routers: choose the experts of each token, and their weights.

A router computes one logit per expert. `Choice` is the rule from logits to experts and weights, in which families
differ; `Router` has the matrix that computes the logits.
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
    """Chooses the experts with the highest merit: score + bias, or without a bias the logit itself, which has the same
    order as the scores. The weights are the scores, without the bias.

    each          how many experts a token uses
    score         softmax over all experts, or a sigmoid of each logit
    normed        True: the weights of a token sum to one
    factor        multiplies the weights
    groups        experts are divided into this many groups of consecutive experts
    groups_each   a token's experts come from this many groups, those whose two best experts have the highest summed
                  merit

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
        """logits [..., E], bias [E] -> expert indices of each token and their weights, [..., each] both, best first"""
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
    """`weight` [E, width] has one row per expert.

    opens      True: one more row, whose sigmoid is the gate of the shared expert
    balanced   True: a bias [E] takes part in the choice of experts but not in their weights; training balances the load
               with it
    exact      True: weight and bias are float32 in a model of any dtype
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
        """x [..., W] -> expert indices and weights, [..., each] both, and the gate of the shared expert [..., 1]"""
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
