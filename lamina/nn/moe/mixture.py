"""`Mixture`: a mixture-of-experts MLP: experts that a router chooses per token, and one expert shared by all tokens."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from lamina import kernels
from lamina.activation import Gating
from lamina.errors import InputError
from lamina.nn.linear import Linear
from lamina.nn.mlp import MLP, GatedMLP
from lamina.nn.moe.experts import Experts
from lamina.nn.moe.router import Choice, Count, Router, running_count, within_capacity
from lamina.weights.packed import Packed


class Mixture(nn.Module):
    """onto + factor · (experts(x) + shared(x)): `experts` MLPs of inner width `inner`, and one of inner width `shared`.

    act                          the name of an activation, or a `Gating`, which the shared expert does not use
    shared                       0: none; a module instead: the shared expert itself, called as module(x, onto)
    opens                        True: shared(x) is multiplied by a gate, which the router computes
    balanced, logit_bias, exact  as in `Router`
    gated, bias, identity, weigh_input   as in `Experts`
    factor                       a fixed multiplier (of a shared module given as such, its own)
    latent                       > 0: experts work in this width, between `enter` and `leave`, with biases if
                                 latent_bias; router and shared expert do not
    capacity                     > 0: only this many tokens of a row use an expert; later ones skip it. Tokens of
                                 earlier passes are known only to a `count` given to `forward`

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
        act: str | Gating,
        choice: Choice,
        *,
        shared: int | nn.Module = 0,
        opens: bool = False,
        balanced: bool = False,
        logit_bias: bool = False,
        exact: bool = False,
        gated: bool = True,
        bias: bool = False,
        identity: int = 0,
        weigh_input: bool = False,
        factor: float = 1.0,
        latent: int = 0,
        latent_bias: bool = False,
        capacity: int = 0,
    ) -> None:
        super().__init__()
        if (weigh_input and factor != 1) or (capacity and choice.each != 1) or (opens and not shared):
            raise InputError(
                f"a mixture cannot have factor={factor} and weigh_input={weigh_input}, capacity={capacity} and "
                f"{choice.each} experts per token, or opens={opens} and shared={shared}"
            )
        self.capacity = capacity
        self.router = Router(
            width, experts + identity, replace(choice, factor=choice.factor * factor), opens=opens,
            balanced=balanced, logit_bias=logit_bias, exact=exact,
        )  # fmt: skip
        self.enter = Linear(width, latent, bias=latent_bias) if latent else None
        self.leave = Linear(latent, width, bias=latent_bias) if latent else None
        self.experts = Experts(
            experts, latent or width, inner, act, gated=gated, bias=bias, identity=identity, weigh_input=weigh_input
        )
        name = act.act if isinstance(act, Gating) else act
        self.shared: nn.Module | None = None
        if isinstance(shared, nn.Module):
            self.shared = shared
        elif shared and gated:
            self.shared = GatedMLP(width, shared, name, factors=(1, factor))
        elif shared:
            self.shared = MLP(width, shared, name, factor=factor)

    def forward(self, x: Tensor, onto: Tensor | None = None, count: Count | None = None) -> Tensor:
        """x [..., width] -> [..., width]

        onto    a residual that the result is added to
        count   if there is a capacity: running sums over the tokens of a row, with those of earlier passes
        """
        chosen, weights, opening = self.router(x)
        if self.capacity and (count is not None or chosen.shape[-2] > self.capacity):
            experts = self.router.weight.shape[0] - self.router.opens
            within = within_capacity(chosen, experts, self.capacity, count or running_count)
            weights = weights * within.to(weights.dtype)
        if (native := kernels.recorder()) is not None and self.enter is None:
            return native.experts(self.experts, x, chosen, weights, self._shared_onto(x, opening, onto))
        if kernels.on() and self.enter is None:
            return self._by_kernel(x, chosen, weights, opening, onto)
        if self.enter is not None and self.leave is not None:
            onto = self._shared_onto(x, opening, onto)
            return self.leave(self.experts(self.enter(x), chosen, weights), onto)
        y = self.experts(x, chosen, weights)
        if self.shared is not None:
            y = y + (self.shared(x) if opening is None else opening * self.shared(x))
        return y if onto is None else onto + y

    def _by_kernel(
        self, x: Tensor, chosen: Tensor, weights: Tensor, opening: Tensor | None, onto: Tensor | None
    ) -> Tensor:
        """A shared expert of the same kind as the others is part of their launches."""
        experts, shared = self.experts, self.shared
        weights_of, factor = None, 1.0
        if isinstance(shared, GatedMLP) and experts.gated and experts.plain_gating and shared.gate_factor == 1:
            weights_of, factor = (shared.gate_up, shared.down), shared.down_factor
        elif isinstance(shared, MLP) and not experts.gated:
            weights_of, factor = (shared.up, shared.down), shared.factor
        packed = experts.packed or (
            weights_of is not None and any(isinstance(one.weight, Packed) for one in weights_of)
        )
        if packed or weights_of is None or weights_of[0].bias is not None or shared.act is not experts.act:
            return experts.by_kernel(x, chosen, weights, onto=self._shared_onto(x, opening, onto))
        first, down = weights_of
        fused = first.weight, down.weight
        return experts.by_kernel(x, chosen, weights, fused, opening, onto, shared_factor=factor)

    def _shared_onto(self, x: Tensor, opening: Tensor | None, onto: Tensor | None) -> Tensor | None:
        """onto + opening · shared(x)"""
        if self.shared is None:
            return onto
        if opening is None:
            return self.shared(x, onto)
        y = opening * self.shared(x)
        return y if onto is None else onto + y
