"""A packed weight to plain values on the device, for products with many vectors (`linear.many_product`)."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.launch import begin, launch
from lamina.kernels.packed.matrix import SPANS, PackedMatrix
from lamina.kernels.packed.values import tile_values

ROWS, BLOCK = 8, 512  # of a program


def dequantize(weight: PackedMatrix, out: Tensor) -> Tensor:
    """The values of a packed weight [M, K], written to out [M, K]; -> out"""
    m, k = weight.shape
    zeros = weight.zeros if weight.offsets is None else weight.offsets
    kind = "integer" if weight.zeros is not None else "" if weight.offsets is None else "offset"
    single = weight.scales.numel() == 1
    launch(
        _dequantize_kernel, (triton.cdiv(m, ROWS), triton.cdiv(k, BLOCK)),
        weight.codes, weight.scales, weight.scales if zeros is None else zeros, out, m, k,
        0 if single else weight.scales.shape[1], out.stride(0), KIND=weight.kind, SPAN=SPANS[weight.kind],
        GROUP=weight.group, SIDE=weight.side, SIGNED=kind != "integer", ZEROS=kind,
        ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(
    codes, scales, zeros,  # uint8 [M, K] or [M, K / 2]; [M / SIDE, K / GROUP], zeros or offsets of the same shape
    out,  # [M, K]
    M, K, scale_stride, out_stride,
    KIND: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SIGNED: tl.constexpr,
    ZEROS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j): rows i · ROWS … + ROWS, values j · BLOCK … + BLOCK."""
    begin(PDL)
    PIECES: tl.constexpr = BLOCK // SPAN
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    there = (r < M)[:, None] & (piece * SPAN < K)[None, :]
    byte = (piece * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
    keep = there[:, :, None]
    tile = tl.load(codes + (r * (K // SPAN * 16))[:, None, None] + byte, mask=keep, other=0)
    at = (r // SIDE)[:, None] * scale_stride + (piece * SPAN // GROUP)[None, :]
    scale = tl.load(scales + at, mask=there, other=0)
    zero = scale
    if ZEROS != "":
        zero = tl.load(zeros + at, mask=there, other=0)
    low, high = tile_values(tile, scale, zero, out.dtype.element_ty, KIND, SIGNED, ZEROS)
    value = (piece * SPAN)[None, :, None] + tl.arange(0, 16)[None, None, :]
    out += (r * out_stride)[:, None, None] + value
    tl.store(out, low, mask=keep)
    if SPAN == 32:
        tl.store(out + 16, high, mask=keep)
