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
    """y = x Wᵀ + b for x [..., in] and W [out, in], and what stands around it, so that one kernel can do it all.

    onto     [..., out] what y is added to (a residual)
    before   a factor on x
    scale    a factor on y, or one for each of its numbers, [out]
    softcap  holds y between -softcap and softcap

    In a captured step x may come before its norm has divided it.
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
        softcap: float | None = None,
    ) -> Tensor:
        if kernels.on():
            return self._by_kernel(x, onto, before, scale, softcap)
        y = self._product(x if before == 1 else x * before)
        if isinstance(scale, Tensor) or scale != 1:
            y = (y * scale).to(y.dtype)
        if softcap is not None:
            y = (y / softcap).tanh() * softcap
        return y if onto is None else onto + y

    def _by_kernel(
        self, x: Tensor, onto: Tensor | None, before: float, scale: float | Tensor, softcap: float | None
    ) -> Tensor:
        from lamina.kernels.gemm.deferred_norm import follower_of, made, parted
        from lamina.kernels.gemm.product import product

        x, squares, eps = parted(x)
        flat, residual = x.reshape(-1, x.shape[-1]), None if onto is None else onto.reshape(-1, onto.shape[-1])
        follower = follower_of(self, x, self.out_features, self.weight.nbytes)
        y = product(
            flat, self.weight, bias=self.bias, residual=residual, before=before, scale=scale, softcap=softcap,
            squares=squares, eps=eps, follower=follower,
        )  # fmt: skip
        return made(y.view(*x.shape[:-1], -1), self, follower)

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
