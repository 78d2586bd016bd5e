"""GGUF blocks as the kernels of a GPU read them: codes apart from scales, each contiguous along a row.

Blocks of 17 to 210 bytes cannot be loaded in words of 16 bytes. So when a weight is moved to a GPU, its blocks are
taken apart once, one tensor at a time: into 4-bit or 8-bit codes, one scale for each group and, for formats with a
minimum, one offset. Values stay the same; for super-blocks the product of both scales is rounded to float16 if that is
nearly exact, otherwise it is stored in float32.

| GGUF | codes | group | offsets |
|---|---|---|---|
| Q4_0 | int4 | 32 | |
| Q4_1, Q4_K | int4 | 32 | yes |
| Q5_0, Q8_0, IQ4_NL, IQ4_XS | int8 | 32 | |
| Q5_1, Q5_K | int8 | 32 | yes |
| Q3_K, Q6_K | int8 | 16 | |
| Q2_K | int8 | 16 | yes |
| MXFP4 | e2m1, 4 bits | 32 | |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lamina.weights.format import Parts, WeightFormat
from lamina.weights.gguf_blocks import E2M1_DOUBLED, IQ4_VALUES, GGUFFormat, bits, fifth_bits, half, looked_up
from lamina.weights.gguf_k import scales_and_minimums
from lamina.weights.int_groups import IntGroups
from lamina.weights.nibbles import nibbles, pack_nibbles, unpack_nibbles
from lamina.weights.packed import PackedWeight

NEARLY = 2**-10  # relative error of scales up to which float16 is used
Taken = tuple[Tensor, Tensor, Tensor | None]
"""Codes [n, group of a block], scales and offsets [n, groups of a block]."""


class SplitMXFP4(WeightFormat):
    """MXFP4 with codes uint8 [..., out, in / 2], in the order of `IntGroups`, and scales uint8 [..., out, in / 32]."""

    name, group = "MXFP4", 32

    def dequantize(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        exponents = parts["scales"].int() - 128  # the table has twice the values
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        values = looked_up(unpack_nibbles(parts["codes"]), E2M1_DOUBLED).unflatten(-1, (-1, 32))
        return (values * scales[..., None]).flatten(-2).to(dtype)

    def bytes_of(self, out: int, width: int) -> int:
        return out * width // 32 * 17

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(self.name)


def q4_0(blocks: Tensor) -> Taken:
    return blocks[:, 2:], half(blocks, 0), None


def q4_1(blocks: Tensor) -> Taken:
    return blocks[:, 4:], half(blocks, 0), half(blocks, 2)


def q5_0(blocks: Tensor) -> Taken:
    return (nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)).to(torch.int8) - 16, half(blocks, 0), None


def q5_1(blocks: Tensor) -> Taken:
    return (nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)).to(torch.int8), half(blocks, 0), half(blocks, 2)


def q8_0(blocks: Tensor) -> Taken:
    return blocks[:, 2:].view(torch.int8), half(blocks, 0), None


def iq4_nl(blocks: Tensor) -> Taken:
    return looked_up(nibbles(blocks[:, 2:]), IQ4_VALUES).to(torch.int8), half(blocks, 0), None


def q2_k(blocks: Tensor) -> Taken:
    codes = bits(blocks[:, 16:80].unflatten(1, (2, 32)), (0, 2, 4, 6), 3).reshape(-1, 256)
    return codes.to(torch.int8), half(blocks, 80) * (blocks[:, :16] & 15), -half(blocks, 82) * (blocks[:, :16] >> 4)


def q3_k(blocks: Tensor) -> Taken:
    scales = nibbles(blocks[:, 96:104]) | bits(blocks[:, 104:108], (0, 2, 4, 6), 3).flatten(1) << 4
    codes = bits(blocks[:, 32:96].unflatten(1, (2, 32)), (0, 2, 4, 6), 3).reshape(-1, 256)
    codes = codes | bits(blocks[:, :32], range(8), 1).reshape(-1, 256) << 2
    return codes.to(torch.int8) - 4, half(blocks, 108) * (scales.float() - 32), None


def with_minimums(codes: Tensor, blocks: Tensor) -> Taken:
    scales, least = scales_and_minimums(blocks[:, 4:16])
    return codes, half(blocks, 0) * scales, -half(blocks, 2) * least


def q4_k(blocks: Tensor) -> Taken:
    codes = nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 256)
    return with_minimums(pack_nibbles(codes), blocks)


def q5_k(blocks: Tensor) -> Taken:
    codes = nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    codes = codes | bits(blocks[:, 16:48], range(8), 1) << 4
    return with_minimums(codes.flatten(1).to(torch.int8), blocks)


def q6_k(blocks: Tensor) -> Taken:
    low = nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 8, 32)
    high = bits(blocks[:, 128:192].unflatten(1, (2, 32)), (0, 2, 4, 6), 3).view(-1, 8, 32)
    codes = (low | high << 4).view(-1, 256).to(torch.int8) - 32
    return codes, half(blocks, 208) * blocks[:, 192:208].view(torch.int8), None


def iq4_xs(blocks: Tensor) -> Taken:
    low = bits(blocks[:, 4:8], (0, 4), 15).transpose(1, 2).flatten(1)
    high = bits(blocks[:, 2:4], (0, 2, 4, 6), 3).transpose(1, 2).flatten(1)
    codes = looked_up(nibbles(blocks[:, 8:].unflatten(1, (8, 16))), IQ4_VALUES).flatten(1).to(torch.int8)
    return codes, half(blocks, 0) * ((low | high << 4).float() - 32), None


WAYS: dict[str, tuple[Callable[[Tensor], Taken], int, int]] = {  # name -> function, bits, group
    "Q4_0": (q4_0, 4, 32), "Q4_1": (q4_1, 4, 32), "Q5_0": (q5_0, 8, 32), "Q5_1": (q5_1, 8, 32), "Q8_0": (q8_0, 8, 32),
    "IQ4_NL": (iq4_nl, 8, 32), "Q2_K": (q2_k, 8, 16), "Q3_K": (q3_k, 8, 16), "Q4_K": (q4_k, 4, 32),
    "Q5_K": (q5_k, 8, 32), "Q6_K": (q6_k, 8, 16), "IQ4_XS": (iq4_xs, 8, 32),
}  # fmt: skip


def repack_model(module: nn.Module) -> None:
    """Takes all GGUF blocks of a model apart, in place, one weight after the other."""
    for one in module.modules():
        if isinstance(one, PackedWeight):
            repack(one)


def repack(weight: PackedWeight) -> None:
    """Takes the blocks of a weight apart, in place; other formats stay as they are.

    >>> from lamina.weights.format import weight_format
    >>> weight = PackedWeight(weight_format("Q8_0"), {"blocks": torch.zeros(2, 34, dtype=torch.uint8)}, (2, 32))
    >>> repack(weight)
    >>> weight
    PackedWeight(int8, groups of 32, [2, 32], 68 bytes)
    """
    if not isinstance(weight.format, GGUFFormat):
        return
    blocks, name = weight.parts["blocks"], weight.format.name
    lead = blocks.shape[:-1]
    if name == "MXFP4":
        each = blocks.unflatten(-1, (-1, 17))
        parts = {"codes": each[..., 1:].flatten(-2).contiguous(), "scales": each[..., 0].contiguous()}
        weight.replace(SplitMXFP4(), parts)
        return
    take, width, group = WAYS[name]
    codes, scales, offsets = take(blocks.reshape(-1, weight.format.size))
    numbers = [scales] if offsets is None else [scales, offsets]
    dtype = torch.float16 if all(map(nearly_half, numbers)) else torch.float32
    parts = {"codes": codes.contiguous().view(torch.uint8).view(*lead, -1), "scales": scales.to(dtype).view(*lead, -1)}
    if offsets is not None:
        parts["offsets"] = offsets.to(dtype).view(*lead, -1)
    weight.replace(IntGroups(width, group), parts)


def nearly_half(values: Tensor) -> bool:
    """Whether float16 has these values, within rounding."""
    if values.is_meta:
        return True
    return bool(((values.half().float() - values).abs() <= NEARLY * values.abs()).all())
