"""MLPs: down(act(up(x))), and gated, down(act(gate(x)) · up(x)), with gate and up in one matrix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lamina import kernels
from lamina.activation import Gating, activation
from lamina.nn.linear import Linear


class MLP(nn.Module):
    """factor: a fixed multiplier of the result"""

    def __init__(self, width: int, inner: int, act: str, bias: bool = False, *, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.up = Linear(width, inner, bias=bias)
        self.down = Linear(inner, width, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x [..., width] -> [..., width]; `onto`: a residual that the result is added to."""
        return self.down(self.up(x, act=self.act), onto, scale=self.factor)


class GatedMLP(nn.Module):
    """factors: fixed multipliers, of the gate before its activation and of the result"""

    def __init__(
        self,
        width: int,
        inner: int,
        act: str = "silu",
        bias: bool = False,
        *,
        factors: Sequence[float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        self.gate_factor, self.down_factor = factors
        self.gate_up = Linear(width, 2 * inner, bias=bias)
        self.down = Linear(inner, width, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x [..., width] -> [..., width]; `onto`: a residual that the result is added to."""
        return self.down(self.inner(x), onto, scale=self.down_factor)

    def inner(self, x: Tensor) -> Tensor:
        if kernels.on() and (y := self._by_kernel(x)) is not None:
            return y
        both = self.gate_up(x)
        if kernels.fuses(both) and (y := self._fused(both)) is not None:
            return y
        gate, up = both.chunk(2, dim=-1)
        return self.act(gate if self.gate_factor == 1 else gate * self.gate_factor) * up

    def _fused(self, both: Tensor) -> Tensor | None:
        """The activation of the product's first half times the second; None if no kernel computes it."""
        from lamina.kernels.elementwise import gated  # imports Triton
        from lamina.kernels.gemm.epilogue import kind_of

        if (kind := kind_of(self.act)) is None:
            return None
        return gated(both, Gating("gelu_new" if kind == "gelu_tanh" else kind), self.gate_factor)

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Both products and the activation in one launch; None for an activation that no kernel computes."""
        from lamina.kernels.gemm.deferred_norm import operand  # imports Triton
        from lamina.kernels.gemm.epilogue import kind_of
        from lamina.kernels.gemm.product import gated_product

        if kind_of(self.act) is None:
            return None
        x, squares, eps = operand(x)
        y = gated_product(
            x.reshape(-1, x.shape[-1]), self.gate_up.weight, self.act, bias=self.gate_up.bias,
            scale=self.gate_factor, squares=squares, eps=eps,
        )  # fmt: skip
        return y.view(*x.shape[:-1], -1)
