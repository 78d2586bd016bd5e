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

    def forward(self, x: Tensor, dtype: torch.dtype | None = None, onto: Tensor | None = None) -> Tensor:
        """The norm in `dtype`, or in that of x, added onto `onto` where that is given (a residual).

        In a captured step the norm of what a product made may come `Unnormed`: the next product divides it.
        """
        if kernels.on():
            from lamina.kernels.gemm.deferred_norm import unnormed
            from lamina.kernels.norm import rms_norm

            if onto is None and (undivided := unnormed(self, x, dtype or x.dtype)) is not None:
                return undivided
            flat, rest = _flat(x), None if onto is None else _flat(onto)
            y = rms_norm(flat, self.weight, self.eps, plus_one=self.plus_one, residual=rest, dtype=dtype)
            return y.view(x.shape)
        y = self._plain(x, dtype)
        return y if onto is None else onto + y

    def _plain(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        dtype, exact = dtype or x.dtype, torch.promote_types(x.dtype, torch.float32)
        weight: Tensor | None = self.weight
        if weight is not None and self.plus_one:
            weight = 1 + weight.to(exact)
        if x.is_cuda and dtype == x.dtype and (weight is None or weight.dtype == dtype):
            exact = dtype  # one kernel, which computes in float32 whatever it reads
        weight = None if weight is None else weight.to(exact)
        return F.rms_norm(x.to(exact), x.shape[-1:], weight, self.eps).to(dtype)


def add_and_norm(x: Tensor, y: Tensor, after: RMSNorm, before: RMSNorm) -> tuple[Tensor, Tensor]:
    """x + after(y), and `before` of that: between two parts of a block that have a norm on both sides."""
    if kernels.on() and after.weight is not None and before.weight is not None and after.plus_one == before.plus_one:
        from lamina.kernels.norm import rms_norm_twice

        weights, eps = (after.weight, before.weight), (after.eps, before.eps)
        added, normed = rms_norm_twice(_flat(y), _flat(x), weights, eps, plus_one=after.plus_one)
        return added.view(x.shape), normed.view(x.shape)
    added = after(y, onto=x)
    return added, before(added)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
