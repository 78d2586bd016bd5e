"""Values of 4 bits, two to a byte, in the two orders that files have.

halves       of each 32 values, byte i has value i in its low half and value i + 16 in its high half: GGUF, `IntGroups`
neighbours   byte i has value 2i in its low half and value 2i + 1 in its high half: GPTQ, compressed-tensors, GPT-OSS
"""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 32  # values whose halves share 16 bytes
AT_ONCE = 1 << 15  # bytes put into order together: they stay in the CPU's cache, and PyTorch starts no threads


def nibbles(codes: Tensor) -> Tensor:
    """codes [..., b] -> [..., 2b]: all low halves, then all high halves"""
    codes = codes.contiguous()  # PyTorch's shifts of strided bytes are slow
    return torch.cat((codes & 15, codes >> 4), -1)


def pack_nibbles(values: Tensor) -> Tensor:
    """values below 16, uint8 [..., in] -> halves [..., in / 2]

    >>> pack_nibbles(torch.arange(32, dtype=torch.uint8) // 2)[:3].tolist()    # value 0 and 16, 1 and 17, 2 and 18
    [128, 128, 145]
    """
    low, high = values.unflatten(-1, (-1, 2, LANES // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """The reverse: uint8 [..., in / 2] -> [..., in]"""
    return nibbles(codes.unflatten(-1, (-1, LANES // 2))).flatten(-2)


def halves_of_neighbours(codes: Tensor) -> Tensor:
    """Neighbours uint8 [..., in / 2] -> halves [..., in / 2], without a byte for each value in between.

    >>> halves_of_neighbours(torch.tensor([0x10, 0x32] + [0] * 6 + [0xBA] + [0] * 7, dtype=torch.uint8))[:4].tolist()
    [160, 177, 2, 3]
    """
    found = torch.empty_like(codes, memory_format=torch.contiguous_format)
    if codes.is_meta:
        return found
    for some, into in zip(in_pieces(codes), in_pieces(found), strict=True):
        wide = some.to(torch.int16)
        apart = (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(-1, 2, LANES // 4)  # [n, half, 8] pairs
        torch.bitwise_or(apart[:, 0], apart[:, 1] << 4, out=into.view(torch.int16).view(-1, LANES // 4))
    return found


def in_pieces(codes: Tensor) -> tuple[Tensor, ...]:
    """Groups of 16 bytes [n, 16], about `AT_ONCE` bytes together: views if the tensor is contiguous."""
    return codes.reshape(-1, LANES // 2).split(AT_ONCE // (LANES // 2))
