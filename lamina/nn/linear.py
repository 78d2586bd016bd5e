"""`Linear`: a matrix product that stays near the memory limit when there are few tokens.

A product with few rows costs what reading the weight costs, if every core reads. On a CPU the library's x Wᵀ does not
do that. The same numbers asked for in another way come two to four times as fast, from the weight as it lies: for one
row as a batch of products, one for each stretch of the weight's rows, for several as W xᵀ.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels

PIECES = 16  # stretches of a weight: enough to give every core some
MOST_ROWS = 64  # with more, F.linear is good
MKL = torch.backends.mkl.is_available()  # whose products these are facts about


class Linear(nn.Linear):
    """y = x Wᵀ + b for x [..., in] and W [out, in], added onto `onto` [..., out] where that is given (a residual)."""

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        if kernels.on():
            return self._by_kernel(x, onto)
        y = self._product(x)
        return y if onto is None else onto + y

    def _by_kernel(self, x: Tensor, onto: Tensor | None) -> Tensor:
        from lamina.kernels.product import product

        residual = None if onto is None else onto.reshape(-1, onto.shape[-1])
        y = product(x.reshape(-1, x.shape[-1]), self.weight, bias=self.bias, residual=residual)
        return y.view(*x.shape[:-1], -1)

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, asked for in the way that is fastest here."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and MKL and not torch.compiler.is_exporting():
        rows = x.numel() // x.shape[-1]
        if 0 < rows <= MOST_ROWS:
            return few_rows(x, weight, bias)
    return F.linear(x, weight, bias)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for few rows. x [..., in], weight [out, in], bias [out] -> [..., out]

    >>> few_rows(torch.ones(1, 3), torch.ones(2, 3))
    tensor([[3., 3.]])
    """
    out, width = weight.shape
    if x.numel() == width:
        pieces = math.gcd(out, PIECES)
        # A transposed row, not a column: the strides of the axis of length 1 decide which kernel is taken.
        column = x.reshape(1, 1, width).mT.expand(pieces, -1, -1)
        y = torch.bmm(weight.view(pieces, -1, width), column)  # [pieces, out / pieces, 1]
    else:
        y = torch.mm(weight, x.reshape(-1, width).t()).t().contiguous()  # [rows, out]
    y = y.view(*x.shape[:-1], out)
    return y if bias is None else y + bias
