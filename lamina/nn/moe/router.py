"""Routers: choose the experts of each token, and their weights.

A router computes one logit per expert. `Choice` is the rule from logits to experts and weights, in which families
differ; `Router` has the matrix that computes the logits. The table in `lamina/nn/moe/__init__.py` has the options of
each family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lamina import kernels
from lamina.errors import InputError
from lamina.nn.initial import random_weight
from lamina.nn.linear import linear


@dataclass(frozen=True)
class Choice:
    """Chooses the experts with the highest merit: score + bias, or without a bias the logit itself, which has the same
    order as the scores. The weights are the scores, without the bias.

    each          how many experts a token uses
    score         softmax over all experts, a sigmoid of each logit, or sparsemixer: softmax over the experts that are
                  not chosen yet and whose logit is near that of the best of them (`jitter`)
    normed        True: the weights of a token sum to one. (A softmax over the chosen logits alone is the same.)
    factor        multiplies the weights
    groups        experts are divided into this many groups of consecutive experts
    groups_each   a token's experts come from this many groups, those with the highest merit
    group_best    the merit of a group is the sum of the merits of this many of its experts, the best ones
    least, eps    normed weights are divided by max(sum, least) + eps
    jitter        sparsemixer: a logit is near the best if (best - logit) / max(|logit|, best) ≤ 2 · jitter

    >>> Choice(each=2, normed=True).of(torch.tensor([2.0, 1.0, 2.0, 0.0]))
    (tensor([0, 2]), tensor([0.5000, 0.5000]))
    """

    each: int
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normed: bool = False
    factor: float = 1.0
    groups: int = 1
    groups_each: int = 1
    group_best: int = 2
    least: float = 0.0
    eps: float = 1e-20
    jitter: float = 0.01

    def of(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [..., E], bias [E] -> expert indices of each token and their weights, [..., each] both, best first"""
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.score == "sparsemixer":
            chosen, weights = self._sparsemixer(exact)
        else:
            scores = exact.softmax(-1) if self.score == "softmax" else exact.sigmoid()
            chosen = self._best(logits if bias is None else scores + bias)
            weights = scores.gather(-1, chosen)
        if self.normed:
            weights = weights / (weights.sum(-1, keepdim=True).clamp(min=self.least) + self.eps)
        return chosen, (weights * self.factor).to(logits.dtype)

    def _best(self, merit: Tensor) -> Tensor:
        """merit [..., E] -> [..., each] indices of the experts with the highest merit in the best groups"""
        if self.groups > 1:
            members = merit.unflatten(-1, (self.groups, -1))  # [..., groups, experts of a group]
            of_group = members.topk(self.group_best, dim=-1).values.sum(-1)
            best = of_group.topk(self.groups_each, dim=-1).indices
            shut = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, best, False)
            merit = members.masked_fill(shut[..., None], float("-inf")).flatten(-2)
        return merit.topk(self.each, dim=-1).indices

    def _sparsemixer(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """SparseMixer as it runs after training (https://arxiv.org/abs/2409.12136): no noise, the best comes first."""
        left, chosen, weights = logits, [], []
        for _ in range(self.each):
            best, index = left.max(-1, keepdim=True)
            far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * self.jitter
            chosen.append(index)
            weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, index))
            left = left.scatter(-1, index, float("-inf"))
        return torch.cat(chosen, -1), torch.cat(weights, -1)


class Router(nn.Module):
    """`weight` [E, width] has one row per expert.

    opens        True: one more row, whose sigmoid is the gate of the shared expert
    balanced     True: `bias` [E] takes part in the choice of experts but not in their weights; training balances the
                 load with it
    logit_bias   True: `logit_bias` [E] is added to the logits
    scaled       True: `scales` [E] multiply the weights of the experts, after the choice
    exact        True: all parameters are float32 in a model of any dtype
    """

    def __init__(
        self,
        width: int,
        experts: int,
        choice: Choice,
        *,
        opens: bool = False,
        balanced: bool = False,
        logit_bias: bool = False,
        scaled: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= choice.each <= experts or experts % choice.groups or choice.groups_each > choice.groups:
            raise InputError(f"{choice} cannot choose from {experts} experts")
        self.choice, self.opens = choice, opens
        self.keep_float32 = ("weight", "bias", "logit_bias", "scales") if exact else ()
        self.weight = random_weight(experts + opens, width)
        self.bias = nn.Parameter(torch.zeros(experts)) if balanced else None
        self.logit_bias = nn.Parameter(torch.zeros(experts)) if logit_bias else None
        self.scales = nn.Parameter(torch.ones(experts)) if scaled else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [..., W] -> expert indices and weights, [..., each] both, and the gate of the shared expert [..., 1]"""
        if (native := kernels.recorder()) is not None:
            return native.route(self, x)
        if kernels.on() and (self.choice.groups == 1 or self.choice.group_best <= 2):
            return self._by_kernel(x)
        chosen, weights, opening = self._plain(x)
        return chosen, weights if self.scales is None else weights * self.scales[chosen], opening

    def _plain(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        logits, opening = linear(x.to(self.weight.dtype), self.weight), None
        if self.opens:
            logits, opening = logits[..., :-1], logits[..., -1:].sigmoid()
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        return *self.choice.of(logits, self.bias), opening

    def _by_kernel(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        from lamina.kernels.gemm.deferred_norm import operand  # imports Triton
        from lamina.kernels.gemm.router import route

        x, squares, eps = operand(x)
        flat = x.reshape(-1, x.shape[-1])
        found = route(
            flat, self.weight, self.choice, self.bias, logit_bias=self.logit_bias, scales=self.scales,
            opens=self.opens, squares=squares, eps=eps,
        )  # fmt: skip
        chosen, weights, opening = (None if one is None else one.view(*x.shape[:-1], -1) for one in found)
        assert chosen is not None and weights is not None
        return chosen, weights, opening


Count = Callable[[Tensor], Tensor]
"""Running sums of [..., T, E] over the tokens of a row, also those of earlier passes if it remembers them."""


def running_count(tokens: Tensor) -> Tensor:
    """Sums over the tokens of this pass."""
    return tokens.cumsum(-2)


def within_capacity(chosen: Tensor, experts: int, capacity: int, count: Count = running_count) -> Tensor:
    """chosen [..., T, 1] -> [..., T, 1]: True for the first `capacity` tokens of a row that chose the same expert.

    >>> within_capacity(torch.tensor([[0], [1], [0], [0]]), experts=2, capacity=2)[:, 0]
    tensor([ True,  True,  True, False])
    """
    of_expert = chosen == torch.arange(experts, device=chosen.device)  # [..., T, E]
    return (count(of_expert.float()) * of_expert).sum(-1, keepdim=True) <= capacity
