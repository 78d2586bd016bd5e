"""`packed_linear`: the one place where a product with a packed weight is computed.

Without kernels, rows of the weight are dequantized block by block into a scratch that fits the cache of the CPU (a
larger one on a GPU), each block once per pass, and multiplied: no more than one block is ever dequantized at a time.
Kernels that read packed weights take over with `use_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.weights.packed import Packed, PackedWeight

FEW = 64  # rows of x up to which the weight is multiplied from the left, as in lamina/nn/linear.py

Product = Callable[[Tensor, PackedWeight], Tensor | None]
"""(x [rows, in], one weight) -> [rows, out]; None where the kernels do not serve this device, dtype, size or format."""

_kernels: dict[str, Product] = {}


def use_kernels(device: str, product: Product | None) -> None:
    """Products on this kind of device are computed by `product` from now on, where it does not return None.

    >>> use_kernels("cpu", lambda x, weight: None)
    >>> use_kernels("cpu", None)                         # no kernels any more
    """
    if product is None:
        _kernels.pop(device, None)
    else:
        _kernels[device] = product


def has_kernels(device: str) -> bool:
    return device in _kernels


def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b: x [..., in], weight [out, in], bias [out] -> [..., out], in the dtype of x."""
    flat, start = x.reshape(-1, x.shape[-1]), 0
    segments, kernel = weight.segments, _kernels.get(x.device.type)
    y = flat.new_empty(flat.shape[0], weight.shape[0])
    for segment in segments:
        end = start + segment.shape[0]
        found = None if kernel is None else kernel(flat, segment)
        if found is None:
            dequantized_product(flat, segment, y[:, start:end])
        elif len(segments) == 1:
            y = found
        else:
            y[:, start:end] = found
        start = end
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], weight.shape[0])


def dequantized_product(x: Tensor, weight: PackedWeight, y: Tensor) -> None:
    """y [rows, out] = x [rows, in] Wᵀ, with one block of rows of W dequantized at a time."""
    if (order := weight.parts.get("order")) is not None:
        x = x.index_select(1, order)
    if few := x.shape[0] <= FEW and x.device.type == "cpu":
        x = x.t()
    for start, end in weight.row_blocks():
        values = weight.values(start, end, x.dtype, ordered=False)
        if few:
            y[:, start:end] = torch.mm(values, x).t()
        else:
            torch.mm(x, values.t(), out=y[:, start:end])
