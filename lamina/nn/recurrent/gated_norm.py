"""RMS norm with a gate, at the end of a recurrent mixer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels


class GatedRMSNorm(nn.Module):
    """norm(x · act(gate)), or norm(x) · act(gate), computed in float32 or better and returned in the gate's dtype.

    groups      the vector is divided into this many equal parts, each normalized by itself
    gate_first  True: norm(x · act(gate)); False: norm(x) · act(gate)
    sigmoid     act is sigmoid, not silu
    """

    def __init__(
        self, dim: int, eps: float, *, groups: int = 1, gate_first: bool = True, sigmoid: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.groups, self.gate_first, self.sigmoid = eps, groups, gate_first, sigmoid
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if (native := kernels.recorder()) is not None:
            return native.gated_norm(self, x, gate)
        if kernels.on() or kernels.fuses(x):
            from lamina.kernels.norm import gated_rms_norm  # imports Triton

            flat, gates = x.reshape(-1, x.shape[-1]), gate.reshape(-1, *gate.shape[-2:])  # without a copy
            out = gated_rms_norm(
                flat, gates, self.weight, self.eps, groups=self.groups, gate_first=self.gate_first, sigmoid=self.sigmoid
            )
            return out.view(gate.shape)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        factor = (torch.sigmoid if self.sigmoid else F.silu)(gate.to(y.dtype))
        if self.gate_first:
            y = y * factor
        y = y.unflatten(-1, (self.groups, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=self.eps).flatten(-2) * self.weight.to(y.dtype)
        return (y if self.gate_first else y * factor).to(gate.dtype)
