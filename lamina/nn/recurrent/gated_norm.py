"""RMS norm with a silu gate, at the end of a recurrent mixer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels


class GatedRMSNorm(nn.Module):
    """norm(x · silu(gate)), or norm(x) · silu(gate), computed in float32 or better and returned in the gate's dtype.

    groups      equal parts of the vector that are normalised each by itself
    gate_first  whether the gate comes before the norm
    """

    def __init__(self, dim: int, eps: float, *, groups: int = 1, gate_first: bool = True) -> None:
        super().__init__()
        self.eps, self.groups, self.gate_first = eps, groups, gate_first
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if kernels.on():
            from lamina.kernels.norm import gated_rms_norm  # imports Triton

            flat, gates = x.reshape(-1, x.shape[-1]), gate.reshape(-1, *gate.shape[-2:])  # as it lies: not copied
            groups, first = self.groups, self.gate_first
            out = gated_rms_norm(flat, gates, self.weight, self.eps, groups=groups, gate_first=first)
            return out.view(gate.shape)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        open_by = F.silu(gate.to(y.dtype))
        if self.gate_first:
            y = y * open_by
        y = y.unflatten(-1, (self.groups, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=self.eps).flatten(-2) * self.weight.to(y.dtype)
        return (y if self.gate_first else y * open_by).to(gate.dtype)
