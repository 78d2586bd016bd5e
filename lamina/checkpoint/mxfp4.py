"""MXFP4 tensors, as GPT-OSS checkpoints store their experts: blocks of 32 four-bit floats with one scale each.

A byte holds two values, the first in its low half. A value is a sign, two bits of exponent and one of mantissa (E2M1);
the scale is a power of two (E8M0: exponent + 127). So every value is exact in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CHUNK = 1 << 18  # blocks at a time: the indices of a value take four bytes
VALUES = (*MAGNITUDES, *(-value for value in MAGNITUDES))


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """blocks [..., in / 32, 16] uint8 and scales [..., in / 32] uint8 -> [..., in]

    >>> dequantize_mxfp4(torch.full((1, 16), 0x21, dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8))[:4]
    tensor([1., 2., 1., 2.], dtype=torch.bfloat16)
    """
    shape = *blocks.shape[:-2], blocks.shape[-2] * 32
    out = torch.empty(scales.numel(), 32, dtype=dtype, device=blocks.device)
    if blocks.is_meta:
        return out.view(shape)
    table = torch.tensor(VALUES, dtype=dtype, device=blocks.device)
    parts = (tensor.split(CHUNK) for tensor in (out, blocks.reshape(-1, 16), scales.reshape(-1, 1)))
    for into, packed, exponents in zip(*parts, strict=True):
        pairs = torch.stack((packed & 15, packed >> 4), -1).flatten(1)  # [blocks, 32]
        into.copy_(torch.ldexp(table[pairs.int()], exponents.int() - 127))
    return out.view(shape)
