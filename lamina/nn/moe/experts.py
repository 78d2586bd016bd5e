"""Mixture of experts: many gated MLPs, of which every token visits a few.

A router gives for each token the experts it chose and their weights (`router.py`); `Experts` runs them.
The same sum is computed in three ways. `by_expert` puts the tokens of an expert side by side, so each chosen expert's
weights are read once and the others never. `gathered` copies out the weights that few tokens need. `everyone` runs all
experts over all tokens: the definition, and the way for many tokens where no shape may depend on the choice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels
from lamina.activation import activation
from lamina.nn.initial import random_weight


class Experts(nn.Module):
    """experts × down(act(gate(x)) · up(x)), as stacks of matrices.

    weigh_input   a router's weight is a factor on what an expert reads, not on what it gives

    >>> experts = Experts(8, width=4, inner=6)
    >>> chosen, weights = torch.tensor([[[0, 5], [2, 3]]]), torch.full((1, 2, 2), 0.5)
    >>> experts(torch.randn(1, 2, 4), chosen, weights).shape
    torch.Size([1, 2, 4])
    """

    def __init__(self, experts: int, width: int, inner: int, act: str = "silu", *, weigh_input: bool = False) -> None:
        super().__init__()
        self.gate_up = random_weight(experts, 2 * inner, width)
        self.down = random_weight(experts, width, inner)
        self.act = activation(act)
        self.weigh_input = weigh_input

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [..., W], chosen and weights [..., K] -> [..., W]: each token's K experts, weighed and added up."""
        if kernels.on():
            return self.by_kernel(x, chosen, weights)
        tokens, chosen, weights = x.flatten(0, -2), chosen.flatten(0, -2), weights.flatten(0, -2)
        few = 3 * chosen.numel() <= self.gate_up.shape[0]  # gathered weights are read, written and read again
        grouped = self._grouped_products(tokens)
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            way = self.by_expert
        elif few and (tokens.shape[0] == 1 or not grouped):
            way = self.gathered
        else:
            way = self.by_expert if grouped else self.everyone
        out = way(tokens, chosen, weights)
        return out.to(x.dtype).view(x.shape)

    def by_kernel(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        shared: tuple[Tensor, Tensor] | None = None,
        opening: Tensor | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        """The same in two launches, for few tokens; with onto + opening · what a shared expert gives.

        shared: its gate and up as one, [2S, W], and its down [W, S]; opening [..., 1]; onto [..., W]
        """
        from lamina.kernels.gemm.deferred_norm import deferred_norm, made, operand  # imports Triton
        from lamina.kernels.gemm.experts import expert_down, expert_gated

        x, squares, eps = operand(x)
        tokens, chosen, weights = x.flatten(0, -2), chosen.flatten(0, -2), weights.flatten(0, -2)
        gate_up, down = (None, None) if shared is None else shared
        h = expert_gated(
            tokens, self.gate_up, chosen, weights, self.act, weigh_input=self.weigh_input, shared=gate_up,
            opening=opening, squares=squares, eps=eps,
        )  # fmt: skip
        residual = None if onto is None else onto.flatten(0, -2)
        deferred = deferred_norm(self, x, x.shape[-1])
        y = expert_down(h, self.down, chosen, shared=down, residual=residual, next_norm=deferred)
        read = self.down.nbytes // len(self.down) * chosen.shape[-1]
        return made(self, y.view(x.shape), deferred, read)

    def by_expert(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [N, W], chosen and weights [N, K] -> [N, W]: (token, expert) pairs in the order of their experts."""
        order = chosen.flatten().argsort(stable=True)  # [P]
        sizes = torch.zeros(self.gate_up.shape[0], dtype=torch.int32, device=x.device)
        sizes.scatter_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
        grouped = self._grouped_products(x)
        groups = sizes.cumsum(0, dtype=torch.int32) if grouped else sizes.tolist()
        pairs = self._weighed_in(x, weights).flatten(0, 1)[order]
        gate, up = _products(pairs, self.gate_up, groups).chunk(2, dim=-1)
        sorted_out = _products(self.act(gate) * up, self.down, groups)
        out = torch.empty_like(sorted_out).index_copy(0, order, sorted_out)
        return self._weighed_out(out.view(*chosen.shape, -1), weights)

    def gathered(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [N, W], chosen and weights [N, K] -> [N, W]: with a copy of each token's experts."""
        inputs = self._weighed_in(x, weights)[..., None]  # [N, K, W, 1]
        gate, up = (F.embedding(chosen, self.gate_up.flatten(1)).unflatten(-1, (-1, x.shape[-1])) @ inputs).chunk(2, -2)
        down = F.embedding(chosen, self.down.flatten(1)).unflatten(-1, (x.shape[-1], -1))
        return self._weighed_out((down @ (self.act(gate) * up))[..., 0], weights)

    def everyone(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [N, W], chosen and weights [N, K] -> [N, W]: all experts, those not chosen with the weight zero."""
        mix = weights.new_zeros(x.shape[0], self.gate_up.shape[0]).scatter(1, chosen, weights)
        inputs = self._weighed_in(x, mix).transpose(0, 1)  # [E, N, W]
        gate, up = (inputs @ self.gate_up.transpose(1, 2)).chunk(2, dim=-1)
        out = (self.act(gate) * up) @ self.down.transpose(1, 2)
        return self._weighed_out(out.transpose(0, 1), mix)

    def _weighed_in(self, x: Tensor, weights: Tensor) -> Tensor:
        """What each expert reads: x [N, W], weights [N, K] -> [N, K, W]"""
        copies = x[:, None].expand(-1, weights.shape[1], -1)
        return (copies * weights[..., None]).to(x.dtype) if self.weigh_input else copies

    def _weighed_out(self, out: Tensor, weights: Tensor) -> Tensor:
        """The sum of what experts give: out [N, K, W], weights [N, K] -> [N, W]"""
        return out.sum(1) if self.weigh_input else (out * weights[..., None]).sum(1)

    def _grouped_products(self, x: Tensor) -> bool:
        """Whether one kernel can do a product per group without the sizes of the groups being known here.

        A pass on the meta device takes the way of one on a GPU.
        """
        aligned = all(stride * x.element_size() % 16 == 0 for stride in (self.gate_up.shape[2], self.down.shape[2]))
        return x.device.type in ("cuda", "meta") and x.dtype == torch.bfloat16 and aligned


def _products(x: Tensor, weight: Tensor, groups: Tensor | list[int]) -> Tensor:
    """Rows of x [P, in] times each group's matrix of weight [E, out, in]; groups: their ends, or their sizes."""
    if isinstance(groups, Tensor):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=groups)
    return torch.cat([F.linear(part, weight[e]) for e, part in enumerate(x.split(groups)) if part.shape[0]])
