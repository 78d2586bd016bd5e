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

from lamina.tracing import portable

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
    if portable():
        return pack_by_arithmetic(codes, bits)
    half = low_bytes(codes.shape[-1], bits)
    first, second = codes[..., :half] & 15, F.pad(codes[..., half:], (0, 2 * half - codes.shape[-1])) & 15
    planes = [_pack_plane(codes >> at & 1) for at in range(4, bits)]
    return first | second << 4, torch.cat(planes, dim=-1) if planes else codes[..., :0]


def unpack(low: Tensor, high: Tensor, count: int, bits: int) -> Tensor:
    """The codes [..., count] that `pack` was given."""
    if bits == 8:
        return low
    if portable():
        return unpack_by_arithmetic(low, high, count, bits)
    codes = torch.cat([low & 15, low >> 4], dim=-1)[..., :count]
    if bits > 4:
        shifts = torch.arange(8, dtype=torch.uint8, device=low.device)
        planes = high.unflatten(-1, (bits - 4, -1))  # [..., planes, bytes]
        flags = (planes[..., None] >> shifts & 1).flatten(-2)[..., :count]  # [..., planes, N]
        for i in range(bits - 4):
            codes = codes | flags[..., i, :] << 4 + i
    return codes


def pack_by_arithmetic(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`pack` in float32, for runtimes without operations on bits."""
    x = codes.float()
    above = (x / 16).floor()
    half, lower = low_bytes(codes.shape[-1], bits), x - 16 * above
    low = lower[..., :half] + 16 * F.pad(lower[..., half:], (0, 2 * half - codes.shape[-1]))
    if bits == 4:
        return low.to(torch.uint8), codes[..., :0]
    above = F.pad(above, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = 2.0 ** torch.arange(8, dtype=torch.float32, device=codes.device)
    planes = []
    for _ in range(4, bits):
        rest = (above / 2).floor()
        planes.append(((above - 2 * rest) * places).sum(-1))
        above = rest
    return low.to(torch.uint8), torch.cat(planes, dim=-1).to(torch.uint8)


def unpack_by_arithmetic(low: Tensor, high: Tensor, count: int, bits: int) -> Tensor:
    """`unpack` in float32, of which the codes are."""
    second = (low.float() / 16).floor()
    codes = torch.cat([low.float() - 16 * second, second], dim=-1)[..., :count]
    if bits > 4:
        places = 2.0 ** torch.arange(8, dtype=torch.float32, device=low.device)
        shifted = (high.float().unflatten(-1, (bits - 4, -1))[..., None] / places).floor()
        flags = (shifted - 2 * (shifted / 2).floor()).flatten(-2)[..., :count]  # [..., planes, N]
        for i in range(bits - 4):
            codes = codes + 2 ** (4 + i) * flags[..., i, :]
    return codes


def _pack_plane(flags: Tensor) -> Tensor:
    """flags [..., N] of 0 and 1 -> bytes [..., ⌈N/8⌉]"""
    shifts = torch.arange(8, dtype=torch.uint8, device=flags.device)
    eights = F.pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (eights << shifts).sum(dim=-1, dtype=torch.uint8)
