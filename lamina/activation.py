"""Activation functions by the names that checkpoints use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.config_fields import UnknownName


def relu2(x: Tensor) -> Tensor:
    """The square of relu."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x), an approximation of gelu."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_python": F.gelu,
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu2": relu2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation function with this name."""
    if name not in ACTIVATIONS:
        raise UnknownName("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class Gating:
    """How a gated MLP joins its two products: act(slope · gate) / slope · (up + plus), with gate ≤ limit and
    |up| ≤ limit.

    limit   None: no limit
    slope   with silu, the result is gate · sigmoid(slope · gate)

    >>> Gating("relu", limit=2.0, plus=1.0)(torch.tensor([3.0, -1.0]), torch.tensor([4.0, 5.0]))
    tensor([6., 0.])
    """

    act: str = "silu"
    limit: float | None = None
    plus: float = 0.0
    slope: float = 1.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        act = activation(self.act)
        opened = act(gate) if self.slope == 1 else act(gate * self.slope) / self.slope
        return opened * (up + self.plus if self.plus else up)
