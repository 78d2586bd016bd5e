"""Feed-forward blocks: down(act(up(x))), and gated, down(act(gate(x)) · up(x)), with gate and up as one matrix."""

from __future__ import annotations

from torch import Tensor, nn

from lamina.nn.activation import activation
from lamina.nn.linear import Linear


class MLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str, bias: bool = False) -> None:
        super().__init__()
        self.up = Linear(width, inner, bias=bias)
        self.down = Linear(inner, width, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * inner, bias=bias)
        self.down = Linear(inner, width, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)
