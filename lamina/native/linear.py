"""Products of plain passes with packed weights on a CPU: prompts, scoring, verification, the chosen experts.

The kernels are those of a native program (`products.h`), with the same activations: int8 in groups of 32 where the
weight says so (`Packed.activations`), else float32. Bias, activation, gate and residual are computed by the thread that
has the product in its cache.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lamina import kernels
from lamina.errors import CaptureError
from lamina.native.arguments import ACTS, TYPES, PermuteArgs, ProductArgs, QuantizeArgs, pointer
from lamina.native.library import library, threads, why_not
from lamina.native.program import Operation, operation, run_on_pytorch_threads
from lamina.native.recorder import SERIAL
from lamina.native.weights import described, is_integer
from lamina.weights.packed import Packed
from lamina.weights.quantize import INT8

LEAST_WORK = 1 << 20  # multiplications from which on several threads share a product
PANEL = 32  # outputs that kernels compute together: a piece of work has a multiple of it
SCALAR_ACTS = {ACTS["gelu"], ACTS["tanh"]}  # activations that kernels compute value by value, more slowly than PyTorch


class Segment(NamedTuple):
    product: Any
    """`Product` without activations and result."""
    order: Tensor | None
    integer: bool


def why_no_native_products() -> str | None:
    """Why plain passes on this machine multiply packed weights by PyTorch; None if native kernels do."""
    if (reason := why_not()) is not None:
        return reason
    if library().lamina_isa() == b"reference":
        return "this machine has none of the instructions that native kernels are written for"
    return None


def linear(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    onto: Tensor | None = None,
    *,
    scale: float = 1.0,
    act: int = 0,
    gated: bool = False,
) -> Tensor | None:
    """act((x Wᵀ + bias) · scale) + onto, [..., out] in the dtype of x; gated: act(gate · scale) · up, gate and up
    stacked. None where no native kernel computes it.

    act   the number of an activation (`ACTS`)
    """
    if not _serves(x, bias, onto) or (segments := _segments(weight)) is None:
        return None
    flat = x.reshape(-1, x.shape[-1]).float()
    flat = flat if flat.stride(1) == 1 and (flat.shape[0] < 2 or flat.stride(0) >= flat.shape[1]) else flat.contiguous()
    rows, width = flat.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = flat.new_empty(rows, outputs)
    if rows == 0:
        return out.to(x.dtype).view(*x.shape[:-1], outputs)
    wide = flat.new_empty(rows, 2 * outputs) if gated else None
    residual = None if onto is None else onto.float().expand(*x.shape[:-1], outputs).reshape(rows, outputs).contiguous()
    bias = None if bias is None else bias.detach().float().contiguous()
    call = _Call()
    inputs: dict[int, tuple[Tensor, tuple[Tensor, ...] | None]] = {}  # by the order of the columns
    products, first, y = [], 0, out if wide is None else wide
    for one in segments:
        key = 0 if one.order is None else one.order.data_ptr()
        if key not in inputs:
            inputs[key] = flat if one.order is None else call.permuted(flat, one.order), None
        given, codes = inputs[key]
        if one.integer and codes is None:
            codes = call.quantized(given)
            inputs[key] = given, codes
        product = type(one.product).from_buffer_copy(one.product)
        product.x, product.x_stride = given.data_ptr(), given.stride(0)
        if one.integer:
            assert codes is not None
            product.activations = 1
            product.qx, product.qx_scales, product.qx_sums = (part.data_ptr() for part in codes)
        product.y, product.y_stride, product.rows = y.data_ptr() + 4 * first, y.shape[1], rows
        first += product.out
        products.append(product)
    array = (type(products[0]) * len(products))(*products)
    pieces = 4 * threads()
    block = max(PANEL, -(-outputs // pieces) // PANEL * PANEL)
    call.add(
        "product",
        ProductArgs(
            segments=ctypes.addressof(array), bias=pointer(bias), residual=pointer(residual), out=out.data_ptr(),
            wide=pointer(wide), count=len(products), rows=rows, outputs=outputs, act=act, gated=gated, block=block,
            scale=scale,
        ),
        serial=rows * width * weight.shape[0] < LEAST_WORK,
    )  # fmt: skip
    run_on_pytorch_threads(call.operations)
    return out.to(x.dtype).view(*x.shape[:-1], outputs)


class _Call:
    """The operations of one call, and the tensors that they point at."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.kept: list[object] = []

    def add(self, kernel: str, arguments: ctypes.Structure, *, serial: bool) -> None:
        """serial: one thread does it alone, since starting the others would take longer"""
        self.kept.append(arguments)
        self.operations.append(operation(kernel, arguments, serial=serial))

    def permuted(self, x: Tensor, order: Tensor) -> Tensor:
        """The columns of x [rows, in] in the order in which a weight stores them."""
        out = x.new_empty(x.shape)
        self.add(
            "permute",
            PermuteArgs(
                x=x.data_ptr(), order=order.data_ptr(), out=out.data_ptr(), rows=x.shape[0], width=x.shape[1],
                x_stride=x.stride(0),
            ),
            serial=x.numel() < SERIAL,
        )  # fmt: skip
        self.kept.append(out)
        return out

    def quantized(self, x: Tensor) -> tuple[Tensor, ...]:
        """int8 codes [rows, in], scales [rows, in / 32] and sums [rows, in / 16] of x [rows, in]."""
        rows, width = x.shape
        codes, scales = x.new_empty(rows, width, dtype=torch.int8), x.new_empty(rows, width // 32)
        sums = x.new_empty(rows, width // 16, dtype=torch.int32)
        self.add(
            "quantize",
            QuantizeArgs(
                x=x.data_ptr(), codes=codes.data_ptr(), scales=scales.data_ptr(), sums=sums.data_ptr(), rows=rows,
                width=width, x_stride=x.stride(0),
            ),
            serial=x.numel() < SERIAL,
        )  # fmt: skip
        return codes, scales, sums


_known: WeakKeyDictionary[Packed, tuple[tuple[object, ...], list[Segment] | None]] = WeakKeyDictionary()


def _segments(weight: Packed) -> list[Segment] | None:
    """What the kernels know of a weight; None if they do not read it. Kept until its parts move."""
    integer = weight.activations == INT8
    parts = [part for one in weight.segments for part in one._buffers.values() if part is not None]
    where = (integer, *(one.format for one in weight.segments), *(part.data_ptr() for part in parts))
    if (found := _known.get(weight)) is None or found[0] != where:
        found = where, _describe(weight, integer)
        _known[weight] = found
    return found[1]


def _describe(weight: Packed, integer: bool) -> list[Segment] | None:
    found = []
    for one in weight.segments:
        if one.device.type != "cpu" or one.ndim != 2:
            return None
        try:
            product, order = described(one)
        except CaptureError:
            return None
        coded = integer and is_integer(product.format)
        found.append(Segment(product, order, coded))
        filled = type(product).from_buffer_copy(product)  # pointers that the check asks for
        filled.x = filled.y = filled.qx = filled.qx_scales = filled.qx_sums = 1
        filled.activations = int(coded)
        if library().lamina_product_check(ctypes.byref(filled)):
            return None
    return found


def _serves(x: Tensor, *others: Tensor | None) -> bool:
    if x.device.type != "cpu" or x.dtype not in TYPES or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, *others)):
        return False
    if kernels.recorder() is not None or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return why_no_native_products() is None
