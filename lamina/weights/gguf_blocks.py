"""GGUF's blocks of 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL and MXFP4.

The one part is `blocks` uint8 [..., out, bytes of a row], exactly the bytes of the file. A block has its scale first
(float16; MXFP4: the exponent of a power of two), then for some a minimum and the fifth bits, then the codes. Of 4-bit
codes, byte i has value i in its low half and value i + 16 in its high half.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.errors import CheckpointError
from lamina.weights.format import Parts, WeightFormat, register
from lamina.weights.nibbles import halves_of_neighbours, nibbles

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class GGUFFormat(WeightFormat):
    """Blocks of `group` values in `size` bytes each."""

    group = 32
    size: int

    def __init__(self) -> None:
        self.name = type(self).__name__

    @abstractmethod
    def values(self, blocks: Tensor) -> Tensor:
        """blocks [n, size] uint8 -> [n, group] float32"""

    def dequantize(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        blocks = parts["blocks"]
        return self.values(blocks.reshape(-1, self.size)).to(dtype).view(*blocks.shape[:-1], shape[-1])

    def bytes_of(self, out: int, width: int) -> int:
        return out * width // self.group * self.size

    def check(self, parts: Parts, shape: Sequence[int], what: str) -> None:
        super().check(parts, shape, what)
        blocks, wanted = parts["blocks"], (*shape[:-1], shape[-1] // self.group * self.size)
        if blocks.dtype != torch.uint8 or tuple(blocks.shape) != wanted:
            raise CheckpointError(
                f"{what} is {self.name} of shape {list(shape)}, whose blocks are uint8 {list(wanted)}; found "
                f"{blocks.dtype} {list(blocks.shape)}"
            )


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]"""
    return blocks[:, at : at + 2].view(torch.float16).float()


def bits(codes: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """codes [..., b] -> [..., shifts, b]: (codes >> shift) & mask for each shift"""
    return (codes[..., None, :] >> torch.tensor(shifts, dtype=torch.uint8, device=codes.device)[:, None]) & mask


def looked_up(codes: Tensor, table: Sequence[int]) -> Tensor:
    """The table's value for each code, float32"""
    values = torch.tensor(table, dtype=torch.float32, device=codes.device)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit j of the 32 at byte `at` -> 16 if it is set, uint8 [n, 32]"""
    words = blocks[:, at : at + 4].contiguous().view(torch.int32)  # [n, 1]
    return (words >> torch.arange(32, dtype=torch.int32, device=words.device) & 1).to(torch.uint8) << 4


class Q4_0(GGUFFormat):
    size = 18

    def values(self, blocks: Tensor) -> Tensor:
        return nibbles(blocks[:, 2:]).float().sub_(8).mul_(half(blocks, 0))


class Q4_1(GGUFFormat):
    size = 20

    def values(self, blocks: Tensor) -> Tensor:
        return nibbles(blocks[:, 4:]).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


class Q5_0(GGUFFormat):
    size = 22

    def values(self, blocks: Tensor) -> Tensor:
        codes = nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)
        return codes.float().sub_(16).mul_(half(blocks, 0))


class Q5_1(GGUFFormat):
    size = 24

    def values(self, blocks: Tensor) -> Tensor:
        codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)
        return codes.float().mul_(half(blocks, 0)).add_(half(blocks, 2))


class Q8_0(GGUFFormat):
    size = 34

    def values(self, blocks: Tensor) -> Tensor:
        return blocks[:, 2:].view(torch.int8).float().mul_(half(blocks, 0))


class IQ4_NL(GGUFFormat):
    size = 18

    def values(self, blocks: Tensor) -> Tensor:
        return looked_up(nibbles(blocks[:, 2:]), IQ4_VALUES).mul_(half(blocks, 0))


class MXFP4(GGUFFormat):
    size = 17

    def values(self, blocks: Tensor) -> Tensor:
        """The scale is 2^(e - 127); the table has twice the values, so here it is half of that."""
        exponents = blocks[:, :1].int() - 128
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        return looked_up(nibbles(blocks[:, 1:]), E2M1_DOUBLED).mul_(scales)


def mxfp4_blocks(codes: Tensor, exponents: Tensor) -> Tensor:
    """MXFP4 as GPT-OSS stores it -> the blocks of a GGUF file.

    codes       uint8 [..., in / 32, 16], two neighbours in a byte, the first in its low half
    exponents   uint8 [..., in / 32]
    """
    return torch.cat((exponents[..., None], halves_of_neighbours(codes)), -1).flatten(-2)


BLOCKS = tuple(kind() for kind in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4))
register(*BLOCKS)
