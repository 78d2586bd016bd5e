"""`Embedding`: one vector per id, times a fixed factor if the family has one."""

from __future__ import annotations

from torch import Tensor, nn

from lamina import kernels
from lamina.weights.packed import Packed


class Embedding(nn.Embedding):
    """The weight is a parameter, or `Packed`: then the rows of the ids alone are dequantized."""

    packable: tuple[str, ...] = ("weight",)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # see `random_weight`
            super().reset_parameters()

    def forward(self, ids: Tensor, scale: float = 1.0, rounded: bool = False, onto: Tensor | None = None) -> Tensor:
        """ids [...] -> [..., width]; `rounded`: the factor is first rounded to the dtype of the vectors.

        onto   [..., width] that the vectors are added to, as learned positions are; None: 0
        """
        if kernels.on():
            if (native := kernels.recorder()) is not None:
                return native.embed(self.weight, ids, scale, rounded, onto)
            from lamina.kernels.embed import embed  # imports Triton

            if isinstance(self.weight, Packed):
                from lamina.kernels.packed.linear import embed_step  # imports Triton

                return embed_step(ids, self.weight, scale, rounded, onto)
            return embed(ids, self.weight, scale, rounded, onto)
        x = self.weight.rows(ids) if isinstance(self.weight, Packed) else super().forward(ids)
        if scale != 1:
            x = x * (x.new_full((), scale) if rounded else scale)
        return x if onto is None else onto + x
