"""`Linear`: a matrix product that runs at memory bandwidth when there are few tokens.

A product with few rows takes as long as reading the weight, if all cores read. MKL's x Wᵀ uses too few of them on a
CPU. The same product written in another way is two to four times as fast, with the weight in place: for one row a
batched product with one batch entry per slice of the weight's rows, for several rows W xᵀ. Products of many rows are
oneDNN's there (`onednn.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels
from lamina.native import linear as native_linear
from lamina.native.operations import act_kind
from lamina.nn import onednn
from lamina.tracing import surely
from lamina.weights.packed import Packed, PackedWeight
from lamina.weights.product import kernels_of, packed_linear, use_kernels

PIECES = 16  # slices of a weight: enough to give every core some
MOST_ROWS = 64  # beyond that F.linear is as fast
LEAST_WEIGHT = 2**16  # values; one core reads a smaller weight faster than several are started
ALIGNED = 8  # outputs of a product, below which rows of 16 bits are not aligned to what a GPU loads at once
MKL = torch.backends.mkl.is_available()  # the library for which this was measured


class Around(NamedTuple):
    """What surrounds a product, in the order in which it is computed; see `Linear`."""

    before: float = 1.0
    scale: float | Tensor = 1.0
    act: Callable[[Tensor], Tensor] | None = None
    softcap: float | None = None

    def after_scale(self, y: Tensor, onto: Tensor | None) -> Tensor:
        """onto + softcap · tanh(act(y) / softcap), by PyTorch"""
        if self.act is not None:
            y = self.act(y)
        if self.softcap is not None:
            y = (y / self.softcap).tanh() * self.softcap
        return y if onto is None else onto + y


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

    The weight is a parameter, or a `Packed` weight if the checkpoint stores it in fewer bits (`lamina/weights`).

    >>> Linear(3, 2)(torch.ones(1, 3), onto=torch.ones(1, 2)).shape
    torch.Size([1, 2])
    """

    packable: tuple[str, ...] = ("weight",)

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
        around = Around(before, scale, act, softcap)
        if kernels.on():
            if (native := kernels.recorder()) is not None:
                return native.linear(self, x, onto, around)
            return self._by_kernel(x, onto, around)
        if (found := self._by_native(x, onto, around)) is not None:
            return found
        if before != 1 and self.bias is None and (isinstance(scale, Tensor) or scale != 1):
            before, scale = 1.0, scale * before  # one factor instead of two
        x = x if before == 1 else x * before
        plain = act is None and softcap is None and not isinstance(scale, Tensor) and scale == 1
        if plain and onto is not None and onto.dtype == x.dtype and onednn.fits(x, self.weight):
            return onednn.product_with(x, self.weight, self.bias, onto, "add")
        y = self._product(x)
        if isinstance(scale, Tensor):
            y = scaled_columns(y, scale)
        elif scale != 1 and act is None and softcap is None and onto is not None:
            return torch.add(onto, y, alpha=scale)
        elif scale != 1:
            y = y * scale
        return around.after_scale(y, onto)

    def _by_native(self, x: Tensor, onto: Tensor | None, around: Around) -> Tensor | None:
        """A packed product and what surrounds it in one native call on a CPU; None where other ways are taken."""
        before, scale, act, softcap = around
        if isinstance(scale, Tensor) or softcap is not None or (before != 1 and self.bias is not None):
            return None
        if onto is not None and onto.dtype != x.dtype:
            return None
        return native_product(x, self.weight, self.bias, onto, scale=before * scale, act=act)

    def _by_kernel(self, x: Tensor, onto: Tensor | None, around: Around) -> Tensor:
        from lamina.kernels.gemm.deferred_norm import deferred_norm, made  # which import Triton
        from lamina.kernels.gemm.epilogue import kind_of
        from lamina.kernels.gemm.inline_norm import operand_and_norm
        from lamina.kernels.gemm.product import product

        before, scale, act, softcap = around
        if act is not None and kind_of(act) is None:  # no kernel computes it: PyTorch does, between two launches
            return around.after_scale(self._by_kernel(x, None, around._replace(act=None, softcap=None)), onto)
        if isinstance(self.weight, Packed):
            from lamina.kernels.packed.linear import linear_step  # imports Triton

            several = len(self.weight.segments) > 1  # each of its launches has some of the outputs
            deferred = None if several else deferred_norm(self, x, self.out_features)
            y = linear_step(
                x, self.weight, residual=onto, bias=self.bias, before=before, scale=scale, act=act, softcap=softcap,
                next_norm=deferred,
            )  # fmt: skip
            return made(self, y, deferred, self.weight.nbytes)
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


def scaled_columns(y: Tensor, scale: Tensor) -> Tensor:
    """y · scale in y's dtype, y [..., out] of a product, which may be overwritten, scale [out]"""
    if y.is_contiguous() and kernels.fuses(y):
        from lamina.kernels.elementwise import scale_columns  # imports Triton

        return scale_columns(y, scale)
    return (y * scale).to(y.dtype)


def linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """F.linear, by whichever operation is fastest on this device. x [..., in], weight [out, in] -> [..., out]"""
    if isinstance(weight, Packed):
        return packed_linear(x, weight, bias)
    on_mkl = MKL and x.device.type == "cpu" and x.dtype == torch.float32
    if on_mkl and weight.numel() >= LEAST_WEIGHT:
        if surely(x.numel() <= MOST_ROWS * x.shape[-1]):
            return few_rows(x, weight, bias)
        if onednn.fits(x, weight):
            return onednn.product(x, weight, bias)
    if weight.shape[0] < ALIGNED and kernels.fuses(x):  # cuBLAS has slow kernels alone for rows of so few values
        pad = ALIGNED - weight.shape[0]
        bias = None if bias is None else F.pad(bias, (0, pad))
        return F.linear(x, F.pad(weight, (0, 0, 0, pad)), bias)[..., : weight.shape[0]]
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


def packed_on_gpu(x: Tensor, weight: Packed) -> Tensor | None:
    """x [N, in] times a packed weight in plain passes on a GPU; None where no kernel can."""
    if not kernels.fuses(x) or not isinstance(weight, PackedWeight):
        return None
    from lamina.kernels.packed.linear import plain_product  # imports Triton

    return plain_product(x, weight)


def packed_on_cpu(x: Tensor, weight: Packed) -> Tensor | None:
    """x [N, in] times a packed weight in plain passes on a CPU; None where no native kernel can."""
    return native_linear.linear(x, weight)


def native_product(
    x: Tensor,
    weight: Tensor | Packed,
    bias: Tensor | None = None,
    onto: Tensor | None = None,
    *,
    scale: float = 1.0,
    act: Callable[[Tensor], Tensor] | None = None,
    gated: bool = False,
) -> Tensor | None:
    """`lamina.native.linear` for packed weights on a CPU; None where products and what follows them are computed apart.

    act   None: none
    """
    if not isinstance(weight, Packed) or kernels_of(x.device.type) is not packed_on_cpu:
        return None
    kind = act_kind(act)
    if kind is None or kind in native_linear.SCALAR_ACTS:
        return None
    return native_linear.linear(x, weight, bias, onto, scale=scale, act=kind, gated=gated)


use_kernels("cuda", packed_on_gpu)
use_kernels("cpu", packed_on_cpu)
