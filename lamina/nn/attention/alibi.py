"""ALiBi: positions are a bias on the scores that falls linearly with the distance, at a fixed slope for each head.

https://arxiv.org/abs/2108.12409
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lamina.attention.bias import SlopeForm


def alibi_slopes(heads: int, *, largest: float = 8.0, scale: float = 1.0) -> list[float]:
    """The slopes of bloom, falcon and mpt: a geometric sequence from 2^(-largest / n) to 2^-largest.

    heads     if not a power of two: every second slope of the next power of two n, then the ones between them
    largest   exponent of the last slope
    scale     factor on all; falcon adds the bias before it divides by √D, so there it is 1 / √D

    >>> alibi_slopes(4), alibi_slopes(3)
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    n = 1 << (heads - 1).bit_length()
    slopes = [scale * 2.0 ** (-largest * (i + 1) / n) for i in range(n)]
    return slopes if n == heads else (slopes[1::2] + slopes[::2])[:heads]


class AlibiBias(nn.Module):
    """The `bias` of `memory.attend`: slopes[head] · (kv_pos - q_pos).

    Families that add slopes[head] · kv_pos have the same probabilities: softmax removes what all keys of a query share.

    >>> AlibiBias(alibi_slopes(2))(torch.tensor([0, 1]), torch.tensor(7), torch.tensor(4))
    tensor([-0.1875, -0.0117])
    """

    def __init__(self, slopes: Sequence[float]) -> None:
        super().__init__()
        self._values = [float(slope) for slope in slopes]
        self.slopes: Tensor
        self.register_buffer("slopes", torch.empty(len(self._values), dtype=torch.float32), persistent=False)
        if not self.slopes.is_meta:
            self.reset_buffers()

    def reset_buffers(self) -> None:
        self.slopes = torch.tensor(self._values, dtype=torch.float32)

    def forward(self, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.slopes[head] * (kv - q)

    def kernel_form(self) -> SlopeForm:
        return SlopeForm(self.slopes)
