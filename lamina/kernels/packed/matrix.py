"""`PackedMatrix`: a packed weight as the product kernels read it, and its values in plain PyTorch.

| kind | codes, uint8 | value | scales |
|---|---|---|---|
| int8 | [M, K], two's complement | scale · code | [M, K / group] |
| int8 with zeros | [M, K], 0 to 255 | scale · (code - zero) | [M, K / group] |
| int4 | [M, K / 2], 0 to 15 | scale · (code - 8) | [M, K / group] |
| int4 with zeros | [M, K / 2] | scale · (code - zero) | [M, K / group] |
| int4 with offsets | [M, K / 2] | scale · code + offset | [M, K / group] |
| fp8 | [M, K], e4m3 | scale · code | float32 [1, 1], [M, 1] or [M / side, K / group] |
| mxfp4 | [M, K / 2], e2m1 | scale · code | uint8 [M, K / 32]: 2^(scale - 127) |

4-bit codes come in blocks of 32 values, 16 bytes: byte i has value i in its lower half and value i + 16 in its upper.
int8 with offsets is scale · code + offset, with signed codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lamina.errors import InputError

Kind = Literal["int8", "int4", "fp8", "mxfp4"]
SPANS: dict[str, int] = {"int8": 16, "int4": 32, "fp8": 16, "mxfp4": 32}  # values in 16 bytes of codes
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A packed weight [M, K]; the table above has its parts.

    group   values of a row that share a scale: 32, 64, 128, … or all of them
    side    rows that share a scale, for fp8 in blocks of 128 × 128

    >>> codes, scales = torch.full((2, 16), 0x19, dtype=torch.uint8), torch.ones(2, 1)
    >>> PackedMatrix("int4", codes, scales, group=32).dense(torch.float32)[0, [0, 16]]
    tensor([ 1., -7.])
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    group: int
    zeros: Tensor | None = None
    offsets: Tensor | None = None
    side: int = 1

    def __post_init__(self) -> None:
        if reason := self.why_not():
            raise InputError(reason)

    @property
    def shape(self) -> tuple[int, int]:
        m, width = self.codes.shape
        return m, width * (2 if self.four_bits else 1)

    @property
    def four_bits(self) -> bool:
        return SPANS[self.kind] == 32

    @property
    def per_row(self) -> bool:
        """Whether one scale is all that a row of fp8 codes has, so that it can multiply the row's sum."""
        return self.kind == "fp8" and self.side == 1 and self.group == self.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.codes, self.scales, self.zeros, self.offsets) if one is not None)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def why_not(self) -> str | None:
        """Why no kernel reads this matrix; None if one does."""
        m, k = self.shape
        span = SPANS[self.kind]
        what = f"{self.kind} weight [{m}, {k}]"
        if self.codes.dtype != torch.uint8 or not self.codes.is_contiguous():
            return f"{what}: codes are {self.codes.dtype}; the kernels read contiguous uint8"
        if k % span:
            return f"{what}: the kernels read rows of a multiple of {span} values"
        if self.group % span or (k % self.group and self.kind != "fp8"):
            return f"{what}: groups of {self.group}; the kernels read groups of a multiple of {span} that divide {k}"
        if self.zeros is not None and self.offsets is not None:
            return f"{what}: has zeros and offsets; the kernels read one of them"
        if self.kind in ("fp8", "mxfp4") and (self.zeros is not None or self.offsets is not None):
            return f"{what}: has zeros or offsets, which only int8 and int4 have"
        return self._why_no_scales(what)

    def _why_no_scales(self, what: str) -> str | None:
        m, k = self.shape
        shape = (-(-m // self.side), -(-k // self.group))
        if self.per_row and self.scales.numel() == 1:
            shape = (1, 1)
        for name, part in (("scales", self.scales), ("zeros", self.zeros), ("offsets", self.offsets)):
            if part is not None and (tuple(part.shape) != shape or not part.is_contiguous()):
                return f"{what}, groups of {self.group}: {name} are {list(part.shape)}; they must be {list(shape)}"
        integers = (self.scales.dtype == torch.uint8) != (self.kind == "mxfp4")
        if integers or (self.zeros is not None and self.zeros.dtype != torch.uint8):
            return f"{what}: scales are {self.scales.dtype}; uint8 for mxfp4 and zeros, floating point otherwise"
        return None

    def rows(self, start: int, end: int) -> PackedMatrix:
        """Some rows, as a view; `start` is a multiple of `side`."""
        one = self.scales.numel() == 1
        parts = [
            None if part is None else part if one else part[start // self.side : -(-end // self.side)]
            for part in (self.scales, self.zeros, self.offsets)
        ]
        assert parts[0] is not None
        return PackedMatrix(self.kind, self.codes[start:end], parts[0], self.group, parts[1], parts[2], self.side)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values [M, K], in plain PyTorch: the reference of the kernels."""
        m, k = self.shape
        values, scales = self._numbers(), self._each(self.scales)
        if self.kind == "mxfp4":
            scales = torch.exp2(scales - 127)
        if self.zeros is not None:
            return ((values - self._each(self.zeros)) * scales).to(dtype)
        if self.offsets is not None:
            return (values * scales + self._each(self.offsets)).to(dtype)
        if self.kind == "int4":
            values = values - 8
        return (values * scales).to(dtype).view(m, k)

    def _numbers(self) -> Tensor:
        """Codes as float32 [M, K]."""
        m, k = self.shape
        if self.four_bits:
            blocks = self.codes.view(m, -1, 1, 16)
            codes = torch.cat([blocks & 15, blocks >> 4], 2).view(m, k)
            if self.kind == "int4":
                return codes.float()
            table = torch.tensor([*E2M1, *(-one for one in E2M1)], device=self.device)
            return table[codes.long()]
        if self.kind == "fp8":
            return self.codes.view(torch.float8_e4m3fn).float()
        return (self.codes if self.zeros is not None else self.codes.view(torch.int8)).float()

    def _each(self, part: Tensor) -> Tensor:
        """Scales, zeros or offsets for each value, float32 [M, K] or broadcastable to it."""
        m, k = self.shape
        if part.numel() == 1:
            return part.float()
        return part.float().repeat_interleave(self.side, 0)[:m].repeat_interleave(self.group, 1)[:, :k]
