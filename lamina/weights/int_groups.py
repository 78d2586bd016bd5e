"""Integers of 8 or 4 bits with a scale for each group of a row: AWQ, GPTQ, compressed-tensors, our own int8 and int4.

codes    uint8 [..., out, in · bits / 8]. 8 bits: one byte per value. 4 bits: of each 32 values, byte i has value i in
         its low half and value i + 16 in its high half
scales   [..., out, in / group], in the dtype in which they are stored
zeros    uint8 [..., out, in / group], optional: a value is scale · (code - zero). Without zeros codes are signed:
         8 bits int8, 4 bits with an offset of 8
offsets  [..., out, in / group], optional: a value is scale · code + offset; 8-bit codes are signed, 4-bit ones are not
order    int32 [..., in], optional (act-order): column j of the codes is column order[j] of the weight
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.errors import CheckpointError, InputError
from lamina.weights.format import Parts, WeightFormat, register
from lamina.weights.nibbles import LANES, pack_nibbles, unpack_nibbles

TRIED = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # shares of the range of a group; the one with the least error is taken
AT_ONCE = 1 << 22  # values quantized together, which bounds the scratch


@dataclass(frozen=True)
class IntGroups(WeightFormat):
    """
    >>> IntGroups(4, 128).bytes_of(1, 4096)   # 2,048 bytes of codes, 32 scales in float16, 32 zeros
    2144
    """

    bits: int
    group: int = 32
    name: str = field(init=False, compare=False, default="")
    whole = frozenset({"order"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"int{self.bits}")

    def __str__(self) -> str:
        return f"{self.name}, groups of {self.group}"

    def dequantize(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes, zeros = parts["codes"], parts.get("zeros")
        values = (
            unpack_nibbles(codes) if self.bits == 4 else codes if zeros is not None else codes.view(torch.int8)
        ).float()  # fmt: skip
        groups = values.unflatten(-1, (-1, self.group))
        if zeros is not None:
            groups.sub_(zeros[..., None])
        elif self.bits == 4 and "offsets" not in parts:
            groups.sub_(8)
        groups.mul_(parts["scales"].float()[..., None])
        if (offsets := parts.get("offsets")) is not None:
            groups.add_(offsets.float()[..., None])
        weight = groups.flatten(-2).to(dtype)
        if (order := parts.get("order")) is None:
            return weight
        place = order.long().argsort(-1)  # where each column of the weight is
        return weight.gather(-1, place[..., None, :].expand_as(weight))

    def bytes_of(self, out: int, width: int) -> int:
        return out * (width * self.bits // 8 + width // self.group * (3 if self.bits == 4 else 2))

    def pack(self, weight: Tensor, scale_dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
        """Round to nearest: 8 bits symmetric, 4 bits with zeros and the range of `TRIED` that has the least error."""
        if weight.shape[-1] % max(self.group, LANES):
            raise InputError(f"rows of {weight.shape[-1]} values cannot be quantized in {self}")
        if weight.is_meta:  # shapes alone: no range is searched for
            return self._unfilled(weight, scale_dtype)
        flat = weight.reshape(-1, weight.shape[-1])
        done = [self._pack_rows(rows, scale_dtype) for rows in flat.split(max(AT_ONCE // flat.shape[1], 1))]
        return {name: torch.cat([one[name] for one in done]).view(*weight.shape[:-1], -1) for name in done[0]}

    def _unfilled(self, weight: Tensor, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        *lead, width = weight.shape
        groups = (*lead, width // self.group)
        parts = {
            "codes": weight.new_empty(*lead, width * self.bits // 8, dtype=torch.uint8),
            "scales": weight.new_empty(groups, dtype=scale_dtype),
        }
        return parts | ({"zeros": weight.new_empty(groups, dtype=torch.uint8)} if self.bits == 4 else {})

    def _pack_rows(self, rows: Tensor, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        groups = rows.float().unflatten(-1, (-1, self.group))  # [n, in / group, group]
        if self.bits == 8:
            scale = usable(groups.abs().amax(-1, keepdim=True) / 127, scale_dtype)
            codes = (groups / scale).round_().clamp_(-128, 127).flatten(1).to(torch.int8)
            return {"codes": codes.view(torch.uint8), "scales": scale[..., 0].to(scale_dtype)}
        codes, scale, zero = least_error(groups, scale_dtype)
        packed = pack_nibbles(codes.flatten(1).to(torch.uint8))
        return {"codes": packed, "scales": scale[..., 0].to(scale_dtype), "zeros": zero[..., 0].to(torch.uint8)}

    def check(self, parts: Parts, shape: Sequence[int], what: str) -> None:
        super().check(parts, shape, what)
        if self.bits not in (4, 8):
            raise CheckpointError(f"{what} has {self.bits} bits; integers of 4 and 8 bits are read")
        if self.bits == 4 and shape[-1] % LANES:
            raise CheckpointError(f"{what} is {self} with rows of {shape[-1]} values; int4 needs a multiple of {LANES}")
        groups = (*shape[:-1], shape[-1] // self.group)
        wanted = {
            "codes": (*shape[:-1], shape[-1] * self.bits // 8),
            "scales": groups,
            "zeros": groups,
            "offsets": groups,
        }
        wanted["order"] = (*shape[:-2], shape[-1])
        for name, part in parts.items():
            if tuple(part.shape) != wanted[name]:
                raise CheckpointError(
                    f"{what} is {self} of shape {list(shape)}, whose {name} are {list(wanted[name])}; found "
                    f"{list(part.shape)}"
                )


def usable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it is stored; 1 where that would be 0."""
    scale = scale.to(dtype).float()
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def least_error(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of 4 bits, scales and zeros for groups [..., group]: over the range from the least to the largest value, or
    over a part of it, which clips a few values and is finer for the others."""
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    found: list[Tensor] = []
    least = torch.full_like(low, torch.inf)
    for share in TRIED:
        scale = usable((high - low) * (share / 15), dtype)
        zero = (-low * share / scale).round_().clamp_(0, 15)
        codes = (groups / scale).round_().add_(zero).clamp_(0, 15)
        error = ((codes - zero) * scale - groups).square_().sum(-1, keepdim=True)
        better, least = error < least, torch.minimum(error, least)
        tried = [codes, scale, zero]
        found = [torch.where(better, new, old) for new, old in zip(tried, found or tried, strict=True)]
    return found[0], found[1], found[2]


register(IntGroups(8), IntGroups(4))
