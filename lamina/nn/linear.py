"""`Linear`: a matrix product that runs at memory bandwidth when there are few tokens.

A product with few rows takes as long as reading the weight, if all cores read. MKL's x Wᵀ uses too few of them on a
CPU. The same product written in another way is two to four times as fast, with the weight in place: for one row a
batched product with one batch entry per slice of the weight's rows, for several rows W xᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels
from lamina.tracing import surely

PIECES = 16  # slices of a weight: enough to give every core some
MOST_ROWS = 64  # beyond that F.linear is as fast
LEAST_WEIGHT = 2**16  # values; one core reads a smaller weight faster than several are started
MKL = torch.backends.mkl.is_available()  # the library for which this was measured


class Linear(nn.Linear):
    """x [..., in] -> onto + softcap · tanh(act(((before · x) Wᵀ + b) · scale) / softcap), [..., out], W [out, in].

    onto      [..., out] residual; None: 0
    before    factor on x
    scale     factor on the product, or one for each output, [out]
    act       activation: a function of `lamina.activation`, or any other; None: none
    softcap   bound of the result's absolute value; None: no tanh

    The surrounding operations are arguments so that one kernel computes all of them. In a captured step x may be
    `Unnormed` or `Inlined`: the kernel then does the rest of a norm. It prepares the next norm where the model's fusion
    plan says so (`kernels/gemm/fusion.py`).

    >>> Linear(3, 2)(torch.ones(1, 3), onto=torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # see `random_weight`
            super().reset_parameters()

    def forward(
        self,
        x: Tensor,
        onto: Tensor | None = None,
        *,
        before: float = 1.0,
        scale: float | Tensor = 1.0,
        act: Callable[[Tensor], Tensor] | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if kernels.on():
            return self._by_kernel(x, onto, before, scale, act, softcap)
        y = self._product(x if before == 1 else x * before)
        if isinstance(scale, Tensor) or scale != 1:
            y = (y * scale).to(y.dtype)
        if act is not None:
            y = act(y)
        if softcap is not None:
            y = (y / softcap).tanh() * softcap
        return y if onto is None else onto + y

    def _by_kernel(
        self,
        x: Tensor,
        onto: Tensor | None,
        before: float,
        scale: float | Tensor,
        act: Callable[[Tensor], Tensor] | None,
        softcap: float | None,
    ) -> Tensor:
        from lamina.kernels.gemm.deferred_norm import deferred_norm, made  # which import Triton
        from lamina.kernels.gemm.epilogue import kind_of
        from lamina.kernels.gemm.inline_norm import operand_and_norm
        from lamina.kernels.gemm.product import product

        if act is not None and kind_of(act) is None:  # no kernel computes it: PyTorch does, between two launches
            y = act(self._by_kernel(x, None, before, scale, None, None))
            y = y if softcap is None else (y / softcap).tanh() * softcap
            return y if onto is None else onto + y
        x, norm = operand_and_norm(x, self.weight)
        flat, residual = x.reshape(-1, x.shape[-1]), None if onto is None else onto.reshape(-1, onto.shape[-1])
        deferred = deferred_norm(self, x, self.out_features)
        y = product(
            flat, self.weight, bias=self.bias, residual=residual, before=before, scale=scale, act=act, softcap=softcap,
            next_norm=deferred, **norm,
        )  # fmt: skip
        return made(self, y.view(*x.shape[:-1], -1), deferred, self.weight.nbytes)

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, by whichever operation is fastest on this device. x [..., in], weight [out, in] -> [..., out]"""
    if x.device.type == "cpu" and x.dtype == torch.float32 and MKL and weight.numel() >= LEAST_WEIGHT:
        rows = x.numel() // max(x.shape[-1], 1)  # an MLP may have no inner dimension
        if surely(rows > 0) and surely(rows <= MOST_ROWS):
            return few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for few rows on a CPU. x [..., in], weight [out, in], bias [out] -> [..., out]

    >>> few_rows(torch.ones(1, 3), torch.ones(2, 3))
    tensor([[3., 3.]])
    """
    out, width = weight.shape
    if x.numel() == width:
        pieces = math.gcd(out, PIECES)
        # A transposed row, not a column: MKL chooses its kernel by the stride of the axis of length 1.
        column = x.reshape(1, 1, width).mT.expand(pieces, -1, -1)
        y = torch.bmm(weight.view(pieces, -1, width), column)  # [pieces, out / pieces, 1]
    else:
        y = torch.mm(weight, x.reshape(-1, width).t()).t().contiguous()  # [rows, out]
    y = y.view(*x.shape[:-1], out)
    return y if bias is None else y + bias
