"""`Mixture`: a mixture-of-experts MLP: experts that a router chooses per token, and one expert shared by all tokens."""

from __future__ import annotations

from torch import Tensor, nn

from lamina import kernels
from lamina.nn.mlp import GatedMLP
from lamina.nn.moe.experts import Experts
from lamina.nn.moe.router import Choice, Router


class Mixture(nn.Module):
    """onto + experts(x) + shared(x): `experts` gated MLPs of inner width `inner`, and one of inner width `shared`.

    opens             True: shared(x) is multiplied by a gate, which the router computes
    balanced, exact   as in `Router`
    weigh_input       True: a router weight multiplies the expert's input instead of its output

    >>> import torch
    >>> mixture = Mixture(width=4, experts=8, inner=6, act="silu", choice=Choice(each=2), shared=5, opens=True)
    >>> mixture(torch.randn(1, 2, 4)).shape
    torch.Size([1, 2, 4])
    """

    def __init__(
        self,
        width: int,
        experts: int,
        inner: int,
        act: str,
        choice: Choice,
        *,
        shared: int,
        opens: bool = False,
        balanced: bool = False,
        exact: bool = False,
        weigh_input: bool = False,
    ) -> None:
        super().__init__()
        self.router = Router(width, experts, choice, opens=opens, balanced=balanced, exact=exact)
        self.experts = Experts(experts, width, inner, act, weigh_input=weigh_input)
        self.shared = GatedMLP(width, shared, act)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x [..., width] -> [..., width]; `onto`: a residual that the result is added to."""
        chosen, weights, opening = self.router(x)
        if kernels.on():
            shared = self.shared.gate_up.weight, self.shared.down.weight
            return self.experts.by_kernel(x, chosen, weights, shared, opening, onto)
        shared_out = self.shared(x) if opening is None else opening * self.shared(x)
        y = self.experts(x, chosen, weights) + shared_out
        return y if onto is None else onto + y
