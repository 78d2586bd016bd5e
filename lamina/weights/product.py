"""`packed_linear`: the one place where a product with a packed weight is computed.

Kernels that read packed weights are registered by `use_kernels`: `lamina/nn/linear.py` has those of a GPU, and the
native ones of a CPU. Without them, rows of the weight are dequantized block by block into a scratch that fits the cache
of the CPU (a larger one on a GPU), each block once per pass, and multiplied: no more than one block is ever dequantized
at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lamina.weights.packed import Packed, PackedWeight

FEW = 64  # rows of x up to which the weight is multiplied from the left, as in lamina/nn/linear.py

Product = Callable[[Tensor, Packed], Tensor | None]
"""(x [rows, in], weight) -> [rows, out]; None where the kernels do not serve this device, dtype, size or format. Of a
weight with several segments that is not served, each segment is asked for."""

_kernels: dict[str, Product] = {}


def use_kernels(device: str, product: Product | None) -> None:
    """Products on this kind of device are computed by `product` from now on, where it does not return None.

    >>> before = kernels_of("cpu")
    >>> use_kernels("cpu", None)                         # PyTorch alone
    >>> use_kernels("cpu", before)
    """
    if product is None:
        _kernels.pop(device, None)
    else:
        _kernels[device] = product


def kernels_of(device: str) -> Product | None:
    """What `use_kernels` registered for this kind of device."""
    return _kernels.get(device)


def has_kernels(device: str) -> bool:
    return device in _kernels


def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b: x [..., in], weight [out, in], bias [out] -> [..., out], in the dtype of x."""
    flat, kernel = x.reshape(-1, x.shape[-1]), _kernels.get(x.device.type)
    y = None if kernel is None else kernel(flat, weight)
    if y is None:
        y = _by_segments(flat, weight, kernel)
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], weight.shape[0])


def _by_segments(x: Tensor, weight: Packed, kernel: Product | None) -> Tensor:
    segments, start = weight.segments, 0
    y = x.new_empty(x.shape[0], weight.shape[0])
    for segment in segments:
        end = start + segment.shape[0]
        found = None if kernel is None or len(segments) == 1 else kernel(x, segment)
        if found is None:
            dequantized_product(x, segment, y[:, start:end])
        else:
            y[:, start:end] = found
        start = end
    return y


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
