"""The formats that codecs write in, each a way from numbers to a few named parts and back.

A field [B, *lead, S, D] becomes parts [B, *lead, S, width], so that a part is stored like any field:

    8, 6, 5 or 4 bits   D is cut into groups of 32, each turned by the 32-wide Hadamard matrix, which spreads what one
                        number holds over all 32 of them. What D leaves over is one smaller group that is not turned.
        name.codes      uint8    8 bits: D bytes; else the low four bits, D/2 bytes, group after group (see bitpack.py)
        name.high       uint8    6 and 5 bits: the bits above, (bits − 4)·D/8 bytes, group after group
        name.scales     float16  [scale, offset] of each group: number = scale · code + offset
    fp8                 the numbers as they come
        name.codes      uint8    D numbers of float8 e4m3
        name.scales     float16  [scale]: number = scale · code

Where a field has a centre, it is taken from the numbers before all else, and added last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lamina.cache.codec.bitpack import high_bytes, low_bytes, pack, unpack

Fields = dict[str, Tensor]
GROUP = 32
SMALLEST = 2.0**-24  # of the numbers above 0 that float16 has


class Form(ABC):
    """How one field is written, whose vectors [..., D] are seen in `dtype`. A centre is [H, 1, D]."""

    parts: dict[str, tuple[int, torch.dtype]]
    """The parts that are kept: name -> (width, dtype)."""

    def __init__(self, dtype: torch.dtype, centre: Tensor | None) -> None:
        self.dtype, self.centre = dtype, centre
        self.exact = torch.promote_types(dtype, torch.float32)

    @abstractmethod
    def encode(self, x: Tensor) -> Fields:
        """[..., D] -> parts [..., width]"""

    @abstractmethod
    def decode(self, parts: Fields) -> Tensor: ...

    @abstractmethod
    def bound(self, x: Tensor) -> Tensor:
        """[..., D] -> [...]: what comes back lies no further from a vector than this, by Euclidean distance.

        It holds for numbers up to 10,000, and leaves out the rounding of the dtype that they come back in.
        """

    def _centred(self, x: Tensor) -> Tensor:
        return x.to(self.exact) if self.centre is None else x.to(self.exact) - self.centre

    def _seen(self, x: Tensor) -> Tensor:
        return (x if self.centre is None else x + self.centre).to(self.dtype)


class Grouped(Form):
    """Whole numbers of few bits, with a scale and an offset for each group of 32."""

    def __init__(
        self, dim: int, bits: int, dtype: torch.dtype, turn: Tensor | None = None, centre: Tensor | None = None
    ) -> None:
        super().__init__(dtype, centre)
        self.bits, self.turn = bits, turn
        whole, rest = divmod(dim, GROUP)
        self.groups = [(n, size) for n, size in ((whole, GROUP), (1, rest)) if n and size]  # how many, how large
        self.low = [low_bytes(size, bits) for _, size in self.groups]
        self.high = [high_bytes(size, bits) for _, size in self.groups]
        self.parts = {"codes": (self._total(self.low), torch.uint8)}
        if bits not in (8, 4):
            self.parts["high"] = (self._total(self.high), torch.uint8)
        self.parts["scales"] = (self._total([2, 2]), torch.float16)

    def encode(self, x: Tensor) -> Fields:
        kept: dict[str, list[Tensor]] = {name: [] for name in self.parts}
        for group in self._groups(x):
            least, most = group.amin(dim=-1, keepdim=True), group.amax(dim=-1, keepdim=True)
            # Offsets are rounded down and scales up, so that nothing falls off either end.
            offset = _half(least - least.abs() / 1024)
            scale = _half_above((most - offset) / (2**self.bits - 1))
            codes = ((group - offset) * _inverse(scale)).round().clamp(0, 2**self.bits - 1)
            low, high = pack(codes.to(torch.uint8), self.bits)
            found = {"codes": low, "high": high, "scales": torch.cat([scale, offset], dim=-1).half()}
            for name, parts in kept.items():
                parts.append(found[name].flatten(-2))
        return {name: torch.cat(parts, dim=-1) for name, parts in kept.items()}

    def decode(self, parts: Fields) -> Tensor:
        low = self._split(parts["codes"], self.low)
        high = self._split(parts["high"], self.high) if "high" in parts else low
        scales = self._split(parts["scales"].to(self.exact), [2] * len(low))
        out = []
        for i, (_, size) in enumerate(self.groups):
            codes = unpack(low[i], high[i], size, self.bits)
            out.append(self._turned(codes * scales[i][..., :1] + scales[i][..., 1:]).flatten(-2))
        return self._seen(torch.cat(out, dim=-1))

    def bound(self, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=self.exact, device=x.device)
        for group in self._groups(x):
            reach = group.amax(dim=-1) - group.amin(dim=-1) + group.abs().amax(dim=-1) / 256
            step = reach / (2**self.bits - 1) + 2 * SMALLEST
            total = total + (group.shape[-1] * (step / 2) ** 2).sum(dim=-1)
        return total.sqrt()

    def _groups(self, x: Tensor) -> list[Tensor]:
        """[..., D] -> centred, cut and turned: [..., groups, size] for each size of group"""
        sizes = [size for _, size in self.groups]
        return [self._turned(groups) for groups in self._split(self._centred(x), sizes)]

    def _total(self, widths: list[int]) -> int:
        return sum(n * width for (n, _), width in zip(self.groups, widths, strict=False))

    def _split(self, x: Tensor, widths: list[int]) -> list[Tensor]:
        """What lies group after group -> [..., groups, width] for each size of group"""
        counts = [n for n, _ in self.groups]
        parts = x.split([n * width for n, width in zip(counts, widths, strict=True)], dim=-1)
        return [part.unflatten(-1, (n, -1)) for part, n in zip(parts, counts, strict=True)]

    def _turned(self, groups: Tensor) -> Tensor:
        return groups if self.turn is None or groups.shape[-1] != GROUP else groups @ self.turn


class Float8(Form):
    """float8 e4m3, with one scale for a vector."""

    def __init__(self, dim: int, dtype: torch.dtype, centre: Tensor | None = None) -> None:
        super().__init__(dtype, centre)
        self.parts = {"codes": (dim, torch.uint8), "scales": (1, torch.float16)}

    def encode(self, x: Tensor) -> Fields:
        x = self._centred(x)
        scale = _half_above(x.abs().amax(dim=-1, keepdim=True) / 448)
        codes = (x * _inverse(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"codes": codes.view(torch.uint8), "scales": scale.half()}

    def decode(self, parts: Fields) -> Tensor:
        numbers = parts["codes"].view(torch.float8_e4m3fn).to(self.exact)
        return self._seen(numbers * parts["scales"].to(self.exact))

    def bound(self, x: Tensor) -> Tensor:
        x = self._centred(x).abs()
        scale = x.amax(dim=-1, keepdim=True) / 448 + 2 * SMALLEST
        return (x / 16 + scale / 512).norm(dim=-1)


def hadamard(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 32-wide Hadamard matrix, divided by √32: it is its own inverse."""
    turn = torch.ones(1, 1, dtype=dtype, device=device)
    while len(turn) < GROUP:
        turn = torch.cat([torch.cat([turn, turn], dim=1), torch.cat([turn, -turn], dim=1)])
    return turn / math.sqrt(GROUP)


def _half(x: Tensor) -> Tensor:
    """Rounded to what float16 has, in the dtype of x."""
    return x.clamp(-65504, 65504).half().to(x.dtype)


def _half_above(x: Tensor) -> Tensor:
    """A number that float16 has and that is no less than x >= 0; 0 for 0."""
    return _half(x * (1 + 2.0**-10) + SMALLEST / 2)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1 / scale, 0)
