"""float8 (e4m3) with scales: one for a matrix, one for each row, or one for each block of 128 × 128.

codes    float8_e4m3fn [..., out, in]
scales   float32 [..., out / rows, in / columns], rounded up: each scale covers `rows` × `columns` values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.errors import CheckpointError
from lamina.weights.format import Parts, WeightFormat, register

BLOCK = 128
LARGEST = 448.0  # of e4m3


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """rows, columns: how many rows and columns share a scale; 0: all of them"""

    rows_each: int = 1
    columns: int = 0
    name: str = field(init=False, compare=False, default="fp8")
    group = 1

    def __str__(self) -> str:
        rows = {0: "a matrix", 1: "a row"}.get(self.rows_each, f"{self.rows_each} rows")
        return f"{self.name}, a scale for {rows}" + (f" × {self.columns} columns" if self.columns else "")

    @property
    def whole(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset() if self.rows_each else frozenset({"scales"})

    def dequantize(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes, scales = parts["codes"], parts["scales"]
        if self.rows_each > 1:
            scales = scales.repeat_interleave(self.rows_each, -2)[..., : codes.shape[-2], :]
        if self.columns:
            scales = scales.repeat_interleave(self.columns, -1)[..., : codes.shape[-1]]
        return float8_values(codes).mul_(scales).to(dtype)

    def bytes_of(self, out: int, width: int) -> int:
        return out * width + 4 * parts_of(out, self.rows_each) * parts_of(width, self.columns)

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """One scale for each row; the largest value of a row becomes the largest of float8."""
        values = weight.float()
        scales = values.abs().amax(-1, keepdim=True) / LARGEST
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        codes = (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"codes": codes, "scales": scales}

    def rows(self, parts: Parts, start: int, end: int) -> tuple[WeightFormat, dict[str, Tensor]]:
        each = self.rows_each
        if each < 2:
            return super().rows(parts, start, end)
        if start % each:
            return self.select(parts, torch.arange(start, end, device=parts["codes"].device))
        scales = parts["scales"][..., start // each : parts_of(end, each), :]
        return self, {"codes": parts["codes"][..., start:end, :], "scales": scales}

    def select(self, parts: Parts, index: Tensor) -> tuple[WeightFormat, dict[str, Tensor]]:
        """Rows out of their blocks of rows have scales of their own."""
        if self.rows_each < 2:
            return super().select(parts, index)
        codes = parts["codes"].view(torch.uint8).index_select(-2, index).view(torch.float8_e4m3fn)
        scales = parts["scales"].index_select(-2, index // self.rows_each)
        return Fp8(1, self.columns), {"codes": codes, "scales": scales}

    def join(self, several: Sequence[Parts]) -> dict[str, Tensor] | None:
        if self.rows_each > 1 and any(parts["codes"].shape[-2] % self.rows_each for parts in several[:-1]):
            return None
        return super().join(several)

    def check(self, parts: Parts, shape: Sequence[int], what: str) -> None:
        codes, scales = parts["codes"], parts["scales"]
        wanted = (*shape[:-2], parts_of(shape[-2], self.rows_each), parts_of(shape[-1], self.columns))
        if codes.dtype != torch.float8_e4m3fn or tuple(codes.shape) != tuple(shape):
            raise CheckpointError(f"{what} is {self} of shape {list(shape)}; found {codes.dtype} {list(codes.shape)}")
        if tuple(scales.shape) != wanted:
            raise CheckpointError(
                f"{what} is {self} of shape {list(shape)}, whose scales are {list(wanted)}; found {list(scales.shape)}"
            )


def float8_values(codes: Tensor) -> Tensor:
    """float32 of float8_e4m3fn. On a CPU by way of float16, whose bits contain those of e4m3: PyTorch's own conversion
    takes six times as long there. NaN becomes ±480.

    >>> float8_values(torch.tensor([0.5, -3.25]).to(torch.float8_e4m3fn)).tolist()
    [0.5, -3.25]
    """
    if codes.device.type != "cpu":
        return codes.float()
    bits = codes.view(torch.uint8).to(torch.int16)
    return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(torch.float16).float().mul_(256)


def parts_of(size: int, each: int) -> int:
    """How many parts of `each` there are, the last one perhaps smaller; 1 if each is 0.

    >>> parts_of(576, 128), parts_of(576, 0)
    (5, 1)
    """
    return -(-size // each) if each else 1


register(Fp8())
