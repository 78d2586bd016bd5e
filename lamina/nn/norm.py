"""RMS norm and layer norm, computed in float32 or better."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels
from lamina.tracing import cast


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last axis, [..., dim] -> [..., dim].

    plus_one   the factor is 1 + weight: the checkpoint stores the difference from one
    weight     False: no factor

    >>> RMSNorm(2, eps=0.0)(torch.tensor([1.0, 7.0])).detach()
    tensor([0.2000, 1.4000])
    """

    def __init__(self, dim: int, eps: float = 1e-6, *, plus_one: bool = False, weight: bool = True) -> None:
        super().__init__()
        self.dim, self.eps, self.plus_one = dim, eps, plus_one
        start = torch.zeros(dim) if plus_one else torch.ones(dim)
        self.weight = nn.Parameter(start) if weight else None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None, onto: Tensor | None = None) -> Tensor:
        """onto + norm(x), in `dtype` or that of x. x and onto [..., dim]; onto is a residual, None: 0

        In a captured step the fusion plan (`kernels/gemm/fusion.py`) may let the module in front compute this norm, and
        this one the norm behind it. The result is `Unnormed` if the next product divides.
        """
        if kernels.on():
            if (native := kernels.recorder()) is not None:
                return native.rms_norm(self, x, dtype, onto)
            return self._by_kernel(x, dtype, onto)
        if kernels.fuses(x):
            from lamina.kernels.norm import rms_norm  # which imports Triton

            residual = None if onto is None else _rows(onto)[:, None]
            y = rms_norm(
                _flat(x)[:, None], self.weight, self.eps, plus_one=self.plus_one, residual=residual, dtype=dtype
            )
            return y.view(x.shape)
        y = self._plain(x, dtype)
        return y if onto is None else onto + y

    def _by_kernel(self, x: Tensor, dtype: torch.dtype | None, onto: Tensor | None) -> Tensor:
        from lamina.kernels.norm import rms_norm, rms_norm_twice  # which imports Triton
        from lamina.kernels.workspace import fusions

        program = fusions(x.device)
        if onto is None:
            if (ready := program.take(self, x, dtype or x.dtype)) is not None:
                return ready
            return rms_norm(_flat(x), self.weight, self.eps, plus_one=self.plus_one, dtype=dtype).view(x.shape)
        alike = self.weight is not None and (dtype or x.dtype) == x.dtype == onto.dtype  # as `rms_norm_twice` needs it
        after = program.norm_after(self) if alike else None
        if after is None:
            y = rms_norm(_flat(x), self.weight, self.eps, plus_one=self.plus_one, residual=_rows(onto), dtype=dtype)
            y = y.view(x.shape)
            return program.made(self, y, plus_one=self.plus_one) if alike else y
        assert self.weight is not None and after.norm.weight is not None
        weights, eps = (self.weight, after.norm.weight), (self.eps, after.norm.eps)
        y, normed = rms_norm_twice(_rows(x), _rows(onto), weights, eps, plus_one=self.plus_one)
        return program.made(self, y.view(x.shape), normed.view(x.shape))

    def _plain(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The norm by PyTorch, in float32 or better and rounded once."""
        dtype, exact = dtype or x.dtype, torch.promote_types(x.dtype, torch.float32)
        weight: Tensor | None = self.weight
        if weight is not None and self.plus_one:
            weight = 1 + cast(weight, exact)
        if x.is_cuda and dtype == x.dtype and (weight is None or weight.dtype == dtype):
            exact = dtype  # PyTorch's fused kernel computes in float32 whatever the inputs are
        weight = None if weight is None else cast(weight, exact)
        return cast(F.rms_norm(cast(x, exact), x.shape[-1:], weight, self.eps), dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / √(var(x) + eps) · weight + bias over the last axis, [..., dim] -> [..., dim].

    weight, bias   False: no factor, no offset

    >>> LayerNorm(2, eps=0.0)(torch.tensor([1.0, 7.0])).detach()
    tensor([-1.,  1.])
    """

    def __init__(self, dim: int, eps: float = 1e-5, *, weight: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim)) if weight else None
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None, onto: Tensor | None = None) -> Tensor:
        """onto + norm(x), in `dtype` or that of x. x and onto [..., dim]; onto is a residual, None: 0

        In a captured step the result is `Inlined` if the products that read it compute it (`kernels/gemm/fusion.py`).
        """
        if kernels.on():
            if (native := kernels.recorder()) is not None:
                return native.layer_norm(self, x, dtype, onto)
            from lamina.kernels.gemm.inline_norm import inlined  # which imports Triton
            from lamina.kernels.norm import layer_norm

            if onto is None and (later := inlined(self, x, dtype or x.dtype)) is not None:
                return later
            residual = None if onto is None else _rows(onto)
            y = layer_norm(_flat(x), self.weight, self.bias, self.eps, residual=residual, dtype=dtype)
            return y.view(x.shape)
        if kernels.fuses(x):
            from lamina.kernels.norm import layer_norm  # imports Triton

            residual = None if onto is None else _rows(onto)
            return layer_norm(_flat(x), self.weight, self.bias, self.eps, residual=residual, dtype=dtype).view(x.shape)
        exact = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if one is None else cast(one, exact) for one in (self.weight, self.bias))
        y = cast(F.layer_norm(cast(x, exact), (self.dim,), weight, bias, self.eps), dtype or x.dtype)
        return y if onto is None else onto + y


Norm = RMSNorm | LayerNorm


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _rows(x: Tensor) -> Tensor:
    """[N, dim] without gaps between vectors, as kernels read a residual."""
    return _flat(x).contiguous()
