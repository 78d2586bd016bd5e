"""GGUF's super-blocks of 256 values: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and IQ4_XS.

A super-block has 8 or 16 groups, whose scales (and minimums) are small integers times one float16 scale (and one
float16 minimum). Codes of more than four bits are stored as a low and a high part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.weights.format import register
from lamina.weights.gguf_blocks import IQ4_VALUES, GGUFFormat, bits, half, looked_up
from lamina.weights.nibbles import nibbles


class SuperBlocks(GGUFFormat):
    group = 256


class Q2_K(SuperBlocks):
    """16 bytes: scale and minimum of 16 values each, 4 bits; 64 bytes of codes; scale; minimum"""

    size = 84

    def values(self, blocks: Tensor) -> Tensor:
        scales = (half(blocks, 80) * (blocks[:, :16] & 15))[..., None]  # [n, 16, 1]
        least = (half(blocks, 82) * (blocks[:, :16] >> 4))[..., None]
        codes = bits(blocks[:, 16:80].unflatten(1, (2, 32)), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
        return codes.float().mul_(scales).sub_(least).flatten(1)


class Q3_K(SuperBlocks):
    """32 bytes: the third bit; 64 bytes: two bits; 12 bytes: 16 scales of 6 bits, offset 32; scale"""

    size = 110

    def values(self, blocks: Tensor) -> Tensor:
        packed = blocks[:, 96:108]
        low = nibbles(packed[:, :8])  # [n, 16]
        high = bits(packed[:, 8:], (0, 2, 4, 6), 3).flatten(1)
        scales = half(blocks, 108) * ((low | high << 4).float() - 32)
        codes = bits(blocks[:, 32:96].unflatten(1, (2, 32)), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
        third = bits(blocks[:, :32], range(8), 1).reshape(-1, 16, 16)
        return (codes | third << 2).float().sub_(4).mul_(scales[..., None]).flatten(1)


def scales_and_minimums(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 minimums of 6 bits: those of the first four groups in the low bits of bytes 0-3 and
    4-7, whose upper two bits complete the halves of bytes 8-11 for the last four."""
    scale, least, rest = packed.unflatten(1, (3, 4)).unbind(1)
    return (
        torch.cat((scale & 63, rest & 15 | scale >> 2 & 48), 1),
        torch.cat((least & 63, rest >> 4 | least >> 2 & 48), 1),
    )


class Q4_K(SuperBlocks):
    """Scale; minimum; 12 bytes of scales and minimums; 128 bytes of codes, 32 low halves before 32 high ones"""

    size = 144

    def values(self, blocks: Tensor) -> Tensor:
        codes = nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32)
        return self.scaled(codes, blocks)

    def scaled(self, codes: Tensor, blocks: Tensor) -> Tensor:
        scales, least = scales_and_minimums(blocks[:, 4:16])
        scales, least = half(blocks, 0) * scales, half(blocks, 2) * least
        return codes.float().mul_(scales[..., None]).sub_(least[..., None]).flatten(1)


class Q5_K(Q4_K):
    """As Q4_K, with 32 bytes of fifth bits before the codes: bit g of byte i is that of value i of group g"""

    size = 176

    def values(self, blocks: Tensor) -> Tensor:
        codes = nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
        return self.scaled(codes | bits(blocks[:, 16:48], range(8), 1) << 4, blocks)


class Q6_K(SuperBlocks):
    """128 bytes: four bits; 64 bytes: two bits; 16 scales int8; scale"""

    size = 210

    def values(self, blocks: Tensor) -> Tensor:
        scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
        low = nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 8, 32)
        high = bits(blocks[:, 128:192].unflatten(1, (2, 32)), (0, 2, 4, 6), 3).view(-1, 8, 32)
        codes = (low | high << 4).view(-1, 16, 16)
        return codes.float().sub_(32).mul_(scales[..., None]).flatten(1)


class IQ4_XS(SuperBlocks):
    """Scale; 16 bits: two high bits of 8 scales; 4 bytes: their four low bits, offset 32; 128 bytes of codes"""

    size = 136

    def values(self, blocks: Tensor) -> Tensor:
        low = bits(blocks[:, 4:8], (0, 4), 15).transpose(1, 2).flatten(1)  # [n, 8]
        high = bits(blocks[:, 2:4], (0, 2, 4, 6), 3).transpose(1, 2).flatten(1)
        scales = half(blocks, 0) * ((low | high << 4).float() - 32)
        codes = nibbles(blocks[:, 8:].unflatten(1, (8, 16)))  # [n, 8, 32]
        return looked_up(codes, IQ4_VALUES).mul_(scales[..., None]).flatten(1)


SUPER_BLOCKS = tuple(kind() for kind in (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS))
register(*SUPER_BLOCKS)
