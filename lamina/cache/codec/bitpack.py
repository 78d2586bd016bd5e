"""Small whole numbers in few bits: 8, 6, 5 or 4 of them each, in bytes that a kernel can take apart by shifts alone.

Eight bits are a byte. Of anything less the low four bits of two numbers share a byte: of N numbers, byte i holds number
i in its low half and number i + ⌈N/2⌉ in its high half. The bits above those lie apart, one plane of N bits for the
fifth and one for the sixth: bit j of byte m belongs to number 8·m + j.

    5 bits, N = 32:   low   16 bytes   byte i:  number i + 16 | number i
                      high   4 bytes   as a little-endian word: bit d is the fifth bit of number d
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTHS = (8, 6, 5, 4)


def low_bytes(numbers: int, bits: int) -> int:
    """
    >>> low_bytes(32, 5), high_bytes(32, 5)
    (16, 4)
    """
    return numbers if bits == 8 else (numbers + 1) // 2


def high_bytes(numbers: int, bits: int) -> int:
    return 0 if bits == 8 else (bits - 4) * ((numbers + 7) // 8)


def pack(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """codes [..., N] uint8, each below 2^bits -> low [..., low_bytes], high [..., high_bytes]"""
    if bits == 8:
        return codes, codes[..., :0]
    half = low_bytes(codes.shape[-1], bits)
    first, second = codes[..., :half] & 15, F.pad(codes[..., half:], (0, 2 * half - codes.shape[-1])) & 15
    planes = [_plane(codes >> at & 1) for at in range(4, bits)]
    return first | second << 4, torch.cat(planes, dim=-1) if planes else codes[..., :0]


def unpack(low: Tensor, high: Tensor, numbers: int, bits: int) -> Tensor:
    """The codes [..., N] that `pack` was given."""
    if bits == 8:
        return low
    codes = torch.cat([low & 15, low >> 4], dim=-1)[..., :numbers]
    if bits > 4:
        shifts = torch.arange(8, dtype=torch.uint8, device=low.device)
        planes = high.unflatten(-1, (bits - 4, -1))  # [..., planes, bytes]
        flags = (planes[..., None] >> shifts & 1).flatten(-2)[..., :numbers]  # [..., planes, N]
        for i in range(bits - 4):
            codes = codes | flags[..., i, :] << 4 + i
    return codes


def _plane(flags: Tensor) -> Tensor:
    """flags [..., N] of 0 and 1 -> bytes [..., ⌈N/8⌉]"""
    shifts = torch.arange(8, dtype=torch.uint8, device=flags.device)
    eights = F.pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (eights << shifts).sum(dim=-1, dtype=torch.uint8)
