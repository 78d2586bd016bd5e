"""Normalisations, computed in float32 or better."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels


class RMSNorm(nn.Module):
    """x / rms(x) · weight, or · (1 + weight) where the checkpoint stores the distance from one."""

    def __init__(self, dim: int, eps: float = 1e-6, *, plus_one: bool = False, weight: bool = True) -> None:
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        start = torch.zeros(dim) if plus_one else torch.ones(dim)
        self.weight = nn.Parameter(start) if weight else None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The norm in `dtype`, or in that of x."""
        if kernels.on():
            from lamina.kernels.norm import rms_norm

            flat = x.reshape(-1, x.shape[-1])
            return rms_norm(flat, self.weight, self.eps, plus_one=self.plus_one, dtype=dtype).view(x.shape)
        if x.dtype == torch.float32 and not self.plus_one and (self.weight is None or self.weight.dtype == x.dtype):
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps).to(dtype or x.dtype)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            weight = self.weight.to(y.dtype)
            y = y * (1 + weight) if self.plus_one else y * weight
        return y.to(dtype or x.dtype)
