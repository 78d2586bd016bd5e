"""Packs unsigned integers of 8, 6, 5 or 4 bits into bytes that a kernel can unpack with shifts alone.

An 8-bit code is a byte. Narrower codes are split. The low four bits of two codes share a byte: of N codes, byte i holds
code i in its low half and code i + ⌈N/2⌉ in its high half. The fifth and sixth bits are stored in bit planes of N bits
each: bit j of byte m belongs to code 8·m + j.

    5 bits, N = 32:   low   16 bytes   byte i:  code i + 16 | code i
                      high   4 bytes   as a little-endian word: bit d is the fifth bit of code d
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTHS = (8, 6, 5, 4)


def low_bytes(count: int, bits: int) -> int:
    """Bytes that hold the low four bits of `count` codes, or all of them if bits == 8.

    >>> low_bytes(32, 5), high_bytes(32, 5)
    (16, 4)
    """
    return count if bits == 8 else (count + 1) // 2


def high_bytes(count: int, bits: int) -> int:
    """Bytes of the bit planes that hold the fifth and sixth bits of `count` codes."""
    return 0 if bits == 8 else (bits - 4) * ((count + 7) // 8)


def pack(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """codes [..., N] uint8, each below 2^bits -> low [..., low_bytes], high [..., high_bytes]"""
    if bits == 8:
        return codes, codes[..., :0]
    half = low_bytes(codes.shape[-1], bits)
    first, second = codes[..., :half] & 15, F.pad(codes[..., half:], (0, 2 * half - codes.shape[-1])) & 15
    planes = [_pack_plane(codes >> at & 1) for at in range(4, bits)]
    return first | second << 4, torch.cat(planes, dim=-1) if planes else codes[..., :0]


def unpack(low: Tensor, high: Tensor, count: int, bits: int) -> Tensor:
    """The codes [..., count] that `pack` was given."""
    if bits == 8:
        return low
    codes = torch.cat([low & 15, low >> 4], dim=-1)[..., :count]
    if bits > 4:
        shifts = torch.arange(8, dtype=torch.uint8, device=low.device)
        planes = high.unflatten(-1, (bits - 4, -1))  # [..., planes, bytes]
        flags = (planes[..., None] >> shifts & 1).flatten(-2)[..., :count]  # [..., planes, N]
        for i in range(bits - 4):
            codes = codes | flags[..., i, :] << 4 + i
    return codes


def _pack_plane(flags: Tensor) -> Tensor:
    """flags [..., N] of 0 and 1 -> bytes [..., ⌈N/8⌉]"""
    shifts = torch.arange(8, dtype=torch.uint8, device=flags.device)
    eights = F.pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (eights << shifts).sum(dim=-1, dtype=torch.uint8)
