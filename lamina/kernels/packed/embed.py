"""Embedding lookup in a packed weight: rows of the tokens of a step, times a factor, added to other values.

The reference is `lamina.nn.Embedding` over `Packed.rows`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.launch import begin, launch
from lamina.kernels.packed.matrix import SPANS, PackedMatrix
from lamina.kernels.packed.values import tile_values

BLOCK = 1024  # values per program


@triton.jit
def _packed_embed(
    ids,  # int64 [N]
    codes, scales, zeros,  # uint8 [V, W] or [V, W / 2]; [V / SIDE, W / GROUP], zeros or offsets of the same shape
    residual, out,  # [N, W]; residual is read if RESIDUAL
    W, scale_stride, scale,
    TYPE: tl.constexpr,  # in which values are rounded before the factor, as rows of a plain weight are
    KIND: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, SIGNED: tl.constexpr,
    ZEROS: tl.constexpr, BLOCK: tl.constexpr, ROUNDED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, i): values i · BLOCK … of the token's row."""
    begin(PDL)
    PIECES: tl.constexpr = BLOCK // SPAN
    r = tl.load(ids + tl.program_id(0))
    piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    there = (piece * SPAN < W)[None, :]
    byte = (piece * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
    tile = tl.load(codes + r * (W // SPAN * 16) + byte, mask=there[:, :, None], other=0)
    at = r // SIDE * scale_stride + (piece * SPAN // GROUP)[None, :]
    one = tl.load(scales + at, mask=there, other=0)
    zero = one
    if ZEROS != "":
        zero = tl.load(zeros + at, mask=there, other=0)
    low, high = tile_values(tile, one, zero, TYPE, KIND, SIGNED, ZEROS)
    factor = tl.full([1, PIECES, 16], 1.0, tl.float32) * scale
    if ROUNDED:
        factor = factor.to(TYPE).to(tl.float32)
    value = tl.program_id(0) * W + (piece * SPAN)[None, :, None] + tl.arange(0, 16)[None, None, :]
    for i in tl.static_range(SPAN // 16):
        x = (high if i else low).to(tl.float32) * factor
        if RESIDUAL:
            x += tl.load(residual + value + 16 * i, mask=there[:, :, None], other=0).to(tl.float32)
        tl.store(out + value + 16 * i, x.to(out.dtype.element_ty), mask=there[:, :, None])


def packed_embed(
    ids: Tensor,
    weight: PackedMatrix,
    dtype: torch.dtype,
    scale: float = 1.0,
    rounded: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """ids int64 [...], weight [V, W], residual [..., W] -> residual + scale · weight[ids], [..., W]

    dtype     of the values
    rounded   the factor is rounded to it
    """
    width = weight.shape[1]
    out = torch.empty(*ids.shape, width, dtype=dtype if residual is None else residual.dtype, device=ids.device)
    zeros = weight.zeros if weight.offsets is None else weight.offsets
    kind = "integer" if weight.zeros is not None else "" if weight.offsets is None else "offset"
    launch(
        _packed_embed, (ids.numel(), triton.cdiv(width, BLOCK)),
        ids.contiguous(), weight.codes, weight.scales, weight.scales if zeros is None else zeros,
        out if residual is None else residual.contiguous(), out, width,
        0 if weight.scales.numel() == 1 else weight.scales.shape[1], scale, TYPE=TYPES[dtype], KIND=weight.kind,
        SPAN=SPANS[weight.kind], GROUP=weight.group, SIDE=weight.side, SIGNED=kind != "integer", ZEROS=kind,
        BLOCK=BLOCK, ROUNDED=rounded, RESIDUAL=residual is not None, num_warps=4,
    )  # fmt: skip
    return out


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
