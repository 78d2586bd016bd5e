"""A weight as native kernels read it: an array of `Product`, one for each segment of its rows."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.errors import CaptureError
from lamina.native.arguments import TYPES, PermuteArgs, QuantizeArgs
from lamina.native.library import library
from lamina.native.products import FORMATS, SCALE_TYPES, Product

if TYPE_CHECKING:
    from lamina.native.recorder import Recorder

PLAIN = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def segments_of(recorder: Recorder, weight: Any, x: Tensor | None, y: Tensor) -> tuple[Any, list[Any]]:
    """-> (Product * segments, what they point at) of y = x Wᵀ

    weight   a tensor [out, in], or a packed weight (lamina.weights)
    x        [rows, in]; None: only rows of the weight are read
    y        [rows, out]
    """
    kept: list[Any] = [weight, x, y]
    if isinstance(weight, Tensor):
        type_of(weight)
        parts = [_described(PLAIN[weight.dtype], weight.shape, weight)]
        _set_input(recorder, parts[0], x, False, kept)
    else:
        parts = []
        for segment in weight.segments:
            part, order = described(segment)
            given = x
            if order is not None and x is not None:
                given = _permuted(recorder, x, order)
                kept += [given, order]
            _set_input(recorder, part, given, recorder.integer and is_integer(part.format), kept)
            parts.append(part)
    first = 0
    for part in parts:
        part.y, part.y_stride, part.rows = y.data_ptr() + 4 * first, y.shape[-1], y.shape[0]
        first += part.out
        if x is not None and (wrong := library().lamina_product_check(ctypes.byref(part))):
            raise CaptureError(f"a weight cannot be multiplied by native kernels: {wrong.decode()}")
    return (Product * len(parts))(*parts), kept


def expert_segments(recorder: Recorder, weight: Any) -> tuple[Any, Any, bool, list[Any]]:
    """A stack of experts' matrices [E, out, in] -> (Product * segments of the first expert, bytes from one expert's
    codes, scales and zeros to the next's [segments, 3], whether activations are int8, what all point at)."""
    parts, steps, kept = [], [], [weight]
    if isinstance(weight, Tensor):
        type_of(weight)
        parts.append(_described(PLAIN[weight.dtype], weight.shape, weight))
        steps.append([weight.stride(0) * weight.element_size(), 0, 0])
    else:
        for segment in weight.segments:
            part, order = described(segment, stacked=True)
            if order is not None:
                raise CaptureError("no native kernel reads experts whose columns are in another order")
            held = [segment.parts.get(name) for name in ("blocks", "codes", "scales", "zeros")]
            step = [0 if one is None else one.stride(0) * one.element_size() for one in held]
            parts.append(part)
            steps.append([max(step[0], step[1]), step[2], step[3]])
    integer = recorder.integer and any(is_integer(part.format) for part in parts)
    if integer and not all(is_integer(part.format) for part in parts):
        raise CaptureError("no native kernel reads experts whose parts need int8 and float32 activations")
    for part in parts:
        part.activations = int(integer)
    flat = [value for step in steps for value in step]
    return (Product * len(parts))(*parts), (ctypes.c_int64 * len(flat))(*flat), integer, kept


def _set_input(recorder: Recorder, part: Product, x: Tensor | None, integer: bool, kept: list[Any]) -> None:
    if x is None:
        return
    part.x, part.x_stride = x.data_ptr(), x.stride(0)
    if integer:
        codes, scales, sums = quantized(recorder, x)
        part.activations = 1
        part.qx, part.qx_scales, part.qx_sums = codes.data_ptr(), scales.data_ptr(), sums.data_ptr()
        kept += [codes, scales, sums]


def quantized(recorder: Recorder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes [rows, in], scales [rows, in / 32] and sums [rows, in / 16] of x [rows, in], which products of
    the same x share."""
    key = ("quantized", x.data_ptr(), x.shape, x.stride())
    if (found := recorder.made.get(key)) is not None:
        return found
    rows, width = x.shape
    codes, sums = recorder.new(rows, width, dtype=torch.int8), recorder.new(rows, width // 16, dtype=torch.int32)
    scales = recorder.new(rows, width // 32)
    arguments = QuantizeArgs(
        x=x.data_ptr(), codes=codes.data_ptr(), scales=scales.data_ptr(), sums=sums.data_ptr(), rows=rows, width=width,
        x_stride=x.stride(0),
    )  # fmt: skip
    recorder.add("quantize", arguments, x, codes, scales, sums, work=x.numel())
    recorder.made[key] = codes, scales, sums
    return codes, scales, sums


def _permuted(recorder: Recorder, x: Tensor, order: Tensor) -> Tensor:
    """The columns of x [rows, in] in the order in which a weight stores them."""
    out = recorder.new(*x.shape)
    arguments = PermuteArgs(
        x=x.data_ptr(), order=order.data_ptr(), out=out.data_ptr(), rows=x.shape[0], width=x.shape[1],
        x_stride=x.stride(0),
    )  # fmt: skip
    recorder.add("permute", arguments, x, order, out, work=x.numel())
    return out


def _described(
    name: str,
    shape: Any,
    codes: Tensor,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    group: int = 0,
    scale_out: int = 0,
) -> Product:
    return Product(
        format=FORMATS[name], out=shape[-2], in_=shape[-1], group=group, codes=codes.data_ptr(),
        scales=None if scales is None else scales.data_ptr(), zeros=None if zeros is None else zeros.data_ptr(),
        scale_type=0 if scales is None else SCALE_TYPES[scales.dtype], scale_out=scale_out,
    )  # fmt: skip


def described(segment: Any, *, stacked: bool = False) -> tuple[Product, Tensor | None]:
    """One `PackedWeight`, and the order of its columns if that is not theirs.

    stacked   True: of a stack of matrices, the first
    """
    parts, shape, name = segment.parts, segment.shape, segment.format.name
    if stacked:
        parts = {one: part[0] for one, part in parts.items()}
    if "blocks" in parts:
        if name not in FORMATS:
            raise CaptureError(f"no native kernel reads weights in {name}")
        return _described(name, shape, _dense(parts["blocks"])), None
    codes, scales = _dense(parts["codes"]), _dense(parts["scales"])
    group = shape[-1] // scales.shape[-1]
    if codes.dtype == torch.float8_e4m3fn:
        rows = -(-shape[-2] // scales.shape[-2]) if scales.dim() > 1 else shape[-2]
        rows = 128 if scales.dim() > 1 and 1 < scales.shape[-2] < shape[-2] else rows
        columns = 128 if scales.dim() > 1 and scales.shape[-1] > 1 else shape[-1]
        return _described("fp8", shape, codes, scales, None, columns, rows), None
    bits = codes.shape[-1] * 8 // shape[-1]
    if bits not in (4, 8):
        raise CaptureError(f"no native kernel reads weights in {name}")
    zeros = parts.get("zeros")
    if scales.dtype not in SCALE_TYPES:
        raise CaptureError(f"no native kernel reads weights in {name} with scales in {scales.dtype}")
    if "offsets" in parts:
        raise CaptureError(f"no native kernel reads weights in {name} with offsets")
    zeros = None if zeros is None else _dense(zeros)
    return _described(f"int{bits}", shape, codes, scales, zeros, group), parts.get("order")


def _dense(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise CaptureError(f"no native kernel reads a packed weight with strides {tuple(x.stride())}")
    return x


def is_integer(format: int) -> bool:
    """Whether products with weights in this format take int8 activations."""
    return format > FORMATS["fp8"]


def nbytes_of(weight: Any) -> int:
    return int(weight.nbytes)


def type_of(x: Tensor) -> int:
    """The number of the dtype of a weight."""
    if x.dtype not in TYPES:
        raise CaptureError(f"no native kernel reads weights in {str(x.dtype).removeprefix('torch.')}")
    if not x.is_contiguous():
        raise CaptureError(f"no native kernel reads a weight with strides {tuple(x.stride())}")
    return TYPES[x.dtype]
