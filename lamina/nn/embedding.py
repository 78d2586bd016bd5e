"""`Embedding`: a vector for each id, times a fixed factor where a family has one."""

from __future__ import annotations

from torch import Tensor, nn

from lamina import kernels


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # see `random_weight`
            super().reset_parameters()

    def forward(self, ids: Tensor, scale: float = 1.0, rounded: bool = False) -> Tensor:
        """ids [...] -> [..., width]; `rounded`: the factor itself is rounded to the dtype of the vectors first."""
        if kernels.on():
            from lamina.kernels.embed import embed  # imports Triton

            return embed(ids, self.weight, scale, rounded)
        x = super().forward(ids)
        if scale == 1:
            return x
        return x * (x.new_full((), scale) if rounded else scale)
