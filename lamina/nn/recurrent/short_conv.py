"""The short causal convolution in front of a recurrence: each channel mixes its last K tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.activation import activation
from lamina.cache.memory import Memory
from lamina.cache.spec import Convolution


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over the layer's memory, then an activation. Checkpoints store the weight [C, K] as
    [C, 1, K]."""

    def __init__(self, channels: int, kernel: int, *, bias: bool = True, act: str | None = None) -> None:
        super().__init__()
        if act is not None:
            activation(act)  # raises if it is not known
        self.act = act
        self.spec = Convolution(channels, kernel)
        self.weight = nn.Parameter(torch.zeros(channels, kernel))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor, memory: Memory, gates: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return memory.convolve(x, self.weight, self.bias, act=self.act, gates=gates)  # [B, T, C]
