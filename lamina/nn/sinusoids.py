"""`Sinusoids`: fixed position embeddings, sines and cosines of position · frequency."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Sinusoids(nn.Module):
    """positions [B, T] -> [B, T, width]: sines in the first half, cosines in the second.

    offset      added to positions
    padding     an index (position + offset) whose embedding is zero
    inclusive   frequencies run from 1 to 1/10,000, that one included; False: without it

    >>> Sinusoids(4)(torch.tensor([[0]]))
    tensor([[[0., 0., 1., 1.]]])
    """

    def __init__(self, width: int, *, offset: int = 0, padding: int | None = None, inclusive: bool = True) -> None:
        super().__init__()
        self.width, self.offset, self.padding, self.inclusive = width, offset, padding, inclusive
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.empty(width // 2), persistent=False)
        if not self.frequencies.is_meta:
            self.reset_buffers()

    def reset_buffers(self) -> None:
        half = self.width // 2
        steps = max(half - 1, 1) if self.inclusive else self.width / 2
        self.frequencies = torch.exp(torch.arange(half).float() * -(math.log(10_000) / steps))

    def forward(self, positions: Tensor) -> Tensor:
        index = positions + self.offset
        angles = index[..., None].float() * self.frequencies
        table = torch.cat([angles.sin(), angles.cos()], dim=-1)
        table = nn.functional.pad(table, (0, self.width % 2))
        if self.padding is None or self.padding < self.offset:
            return table
        return table * (index != self.padding)[..., None]
