"""Formats: how the vectors of one field (keys, values, latents …) are quantized into a few named parts, and back.

A field [B, *lead, S, D] becomes parts [B, *lead, S, width], so a part is stored like any field:

    8, 6, 5 or 4 bits   D is split into groups of 32. Keys and values are rotated: each group is multiplied by the
                        32-wide Hadamard matrix, which spreads an outlier over the whole group. If 32 does not divide
                        D, the rest is one smaller group, which is not rotated.
        name.codes      uint8    8 bits: D bytes; else the low four bits, D/2 bytes, group after group (see bitpack.py)
        name.high       uint8    6 and 5 bits: the bits above, (bits − 4)·D/8 bytes, group after group
        name.scales     float16  [scale, offset] of each group: value = scale · code + offset
    fp8                 vectors are not rotated
        name.codes      uint8    D values of float8 e4m3
        name.scales     float16  [scale]: value = scale · code
    plain               the field is stored as the model computed it, under its own name

Keys have the model's mean key (`key_mean.py`) subtracted before they are quantized; it is added back at the end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lamina.cache.codec.bitpack import WIDTHS, high_bytes, low_bytes, pack, unpack
from lamina.cache.codec.registry import FormatName, register_built_in
from lamina.tracing import portable

Fields = dict[str, Tensor]
CPU = torch.device("cpu")
GROUP = 32
SMALLEST = 2.0**-24  # the smallest float16 above 0


@dataclass(frozen=True)
class Field:
    """What a format is told about the field that it quantizes.

    dim        values D of a vector
    dtype      of the vectors that the model gives and reads
    device     "meta" when sizes are planned
    rotate     True for keys, values and plain vectors, whose values have no fixed meaning; False for latents
    key_mean   [H, 1, D] the mean key of each head, float32 or wider; None for fields other than keys
    """

    dim: int
    dtype: torch.dtype
    device: torch.device = CPU
    rotate: bool = False
    key_mean: Tensor | None = None


class FieldFormat(ABC):
    """How the vectors of one field are quantized. To add a format, subclass it in one file, and register it:

        @lamina.register_format("absmax8")
        class AbsMax8(lamina.FieldFormat):
            def __init__(self, field):
                super().__init__(field)
                self.parts = {"codes": (field.dim, torch.int8), "scale": (1, torch.float32)}

            def quantize(self, x):
                scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
                return {"codes": (x / scale).round().to(torch.int8), "scale": scale.float()}

            def dequantize(self, parts):
                return parts["codes"] * parts["scale"]

            def error_bound(self, x):
                return x.abs().amax(-1) / 127 * x.shape[-1] ** 0.5

    Caches, pools, host residence, files, plans and prefix stores then accept `codec="absmax8"`. `quantize` must give
    the same parts for a token whichever tokens come with it, because a sequence may arrive in any chunks. The methods
    are traced (`torch.compile`) and run on the meta device (`lamina.plan`), so they must not read values back to the
    host or depend on them for shapes.

    Captured decoding (CUDA graphs) quantizes and reads tokens with Triton kernels. A format without a kernel is decoded
    with plain passes, and `Result.how` names the format. `kernel_layout` says which kernel applies, if any. The kernels
    know the layouts of the built-in formats alone: a new layout needs code in lamina/kernels/quant (encode.py writes,
    layout.py unpacks) and a name in lamina/kernels/eligibility.py, and cannot be added from outside.
    """

    parts: dict[str, tuple[int, torch.dtype]]
    """The stored parts: name -> (width, dtype). Set by __init__."""

    rotation: Tensor | None = None
    """The orthogonal matrix [32, 32] that each group of 32 values is multiplied by before it is quantized."""

    def __init__(self, field: Field) -> None:
        self.dtype, self.key_mean = field.dtype, field.key_mean
        self.exact = torch.promote_types(field.dtype, torch.float32)
        self.name = type(self).__name__  # replaced by the registered name

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if (
            "kernel_layout" not in cls.__dict__
        ):  # a subclass may write other bytes than its parent: it must say so itself
            setattr(cls, "kernel_layout", FieldFormat.kernel_layout)  # noqa: B010

    @property
    def kernel_layout(self) -> FormatName | None:
        """The layout by which the attention kernels know these bytes: 8, 6, 5, 4 or "fp8"; None: no kernel reads them.

        The kernels also quantize new tokens. So return a layout only if `quantize` computes what the built-in format of
        that name computes. Subclasses do not inherit it.
        """
        return None

    @abstractmethod
    def quantize(self, x: Tensor) -> Fields:
        """x [..., D], float32 or wider, without the key mean -> parts [..., width]"""

    @abstractmethod
    def dequantize(self, parts: Fields) -> Tensor:
        """parts [..., width] -> x [..., D], without the key mean"""

    @abstractmethod
    def error_bound(self, x: Tensor) -> Tensor:
        """x [..., D] -> [...]: the largest Euclidean distance between a vector and what `dequantize` returns for it.

        It holds for values up to 10,000 in size, and leaves out rounding to the model's dtype.
        """

    def encode(self, x: Tensor) -> Fields:
        """[..., D] as the model gives it -> parts [..., width]"""
        return self.quantize(self._without_mean(x))

    def decode(self, parts: Fields) -> Tensor:
        """parts [..., width] -> [..., D] in the model's dtype"""
        x = self.dequantize(parts)
        return (x if self.key_mean is None else x + self.key_mean).to(self.dtype)

    def bound(self, x: Tensor) -> Tensor:
        """`error_bound` of vectors as the model gives them."""
        return self.error_bound(self._without_mean(x))

    def _without_mean(self, x: Tensor) -> Tensor:
        return x.to(self.exact) if self.key_mean is None else x.to(self.exact) - self.key_mean


class Grouped(FieldFormat):
    """Integers of few bits, with a scale and an offset for each group of 32."""

    def __init__(self, field: Field, bits: int) -> None:
        super().__init__(field)
        self.bits, self.name = bits, f"{bits} bits"
        self.rotation = hadamard(self.exact, field.device) if field.rotate else None
        whole, rest = divmod(field.dim, GROUP)
        self.groups = [(n, size) for n, size in ((whole, GROUP), (1, rest)) if n and size]  # (how many, values of each)
        self.low = [low_bytes(size, bits) for _, size in self.groups]
        self.high = [high_bytes(size, bits) for _, size in self.groups]
        self.parts = {"codes": (self._total(self.low), torch.uint8)}
        if bits not in (8, 4):
            self.parts["high"] = (self._total(self.high), torch.uint8)
        self.parts["scales"] = (self._total([2, 2]), torch.float16)

    @property
    def kernel_layout(self) -> FormatName | None:
        return self.bits

    def quantize(self, x: Tensor) -> Fields:
        kept: dict[str, list[Tensor]] = {name: [] for name in self.parts}
        for group in self._rotated_groups(x):
            least, most = group.amin(dim=-1, keepdim=True), group.amax(dim=-1, keepdim=True)
            # Offsets are rounded down and scales up, so that the codes reach both ends of the range.
            offset = _half(least - least.abs() / 1024)
            scale = _half_above((most - offset) / (2**self.bits - 1))
            codes = ((group - offset) * _inverse(scale)).round().clamp(0, 2**self.bits - 1)
            low, high = pack(codes.to(torch.uint8), self.bits)
            found = {"codes": low, "high": high, "scales": torch.cat([scale, offset], dim=-1).half()}
            for name, parts in kept.items():
                parts.append(found[name].flatten(-2))
        return {name: torch.cat(parts, dim=-1) for name, parts in kept.items()}

    def dequantize(self, parts: Fields) -> Tensor:
        low = self._split(parts["codes"], self.low)
        high = self._split(parts["high"], self.high) if "high" in parts else low
        scales = self._split(parts["scales"].to(self.exact), [2] * len(low))
        out = []
        for i, (_, size) in enumerate(self.groups):
            codes = unpack(low[i], high[i], size, self.bits)
            out.append(self._rotate(codes * scales[i][..., :1] + scales[i][..., 1:]).flatten(-2))
        return torch.cat(out, dim=-1)

    def error_bound(self, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=self.exact, device=x.device)
        for group in self._rotated_groups(x):
            reach = group.amax(dim=-1) - group.amin(dim=-1) + group.abs().amax(dim=-1) / 256
            step = reach / (2**self.bits - 1) + 2 * SMALLEST
            total = total + (group.shape[-1] * (step / 2) ** 2).sum(dim=-1)
        return total.sqrt()

    def _rotated_groups(self, x: Tensor) -> list[Tensor]:
        """[..., D] -> rotated groups [..., groups, size], one tensor for each size of group"""
        sizes = [size for _, size in self.groups]
        return [self._rotate(groups) for groups in self._split(x, sizes)]

    def _total(self, widths: list[int]) -> int:
        return sum(n * width for (n, _), width in zip(self.groups, widths, strict=False))

    def _split(self, x: Tensor, widths: list[int]) -> list[Tensor]:
        """[..., all groups side by side] -> [..., groups, width], one tensor for each size of group"""
        counts = [n for n, _ in self.groups]
        parts = x.split([n * width for n, width in zip(counts, widths, strict=True)], dim=-1)
        return [part.unflatten(-1, (n, -1)) for part, n in zip(parts, counts, strict=True)]

    def _rotate(self, groups: Tensor) -> Tensor:
        """Rotates whole groups. The matrix is its own inverse, so it also rotates back."""
        return groups if self.rotation is None or groups.shape[-1] != GROUP else groups @ self.rotation


class Float8(FieldFormat):
    """float8 e4m3, with one scale for each vector."""

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self.name = "fp8"
        self.parts = {"codes": (field.dim, torch.uint8), "scales": (1, torch.float16)}

    @property
    def kernel_layout(self) -> FormatName | None:
        return "fp8"

    def quantize(self, x: Tensor) -> Fields:
        scale = _half_above(x.abs().amax(dim=-1, keepdim=True) / 448)
        values = (x * _inverse(scale)).clamp(-448, 448)
        codes = float8_codes(values) if portable() else values.to(torch.float8_e4m3fn).view(torch.uint8)
        return {"codes": codes, "scales": scale.half()}

    def dequantize(self, parts: Fields) -> Tensor:
        if portable():
            return float8_values(parts["codes"]).to(self.exact) * parts["scales"].to(self.exact)
        return parts["codes"].view(torch.float8_e4m3fn).to(self.exact) * parts["scales"].to(self.exact)

    def error_bound(self, x: Tensor) -> Tensor:
        x = x.abs()
        scale = x.amax(dim=-1, keepdim=True) / 448 + 2 * SMALLEST
        return (x / 16 + scale / 512).norm(dim=-1)


def float8_codes(x: Tensor) -> Tensor:
    """The bytes of x as float8 e4m3, |x| <= 448, in arithmetic alone, for runtimes without float8.

    In a binade that begins at 2^e, values are multiples of 2^(e − 3); below 2^−6 they are multiples of 2^−9.
    """
    size = x.float().abs()
    exponent = size.clamp(min=2.0**-6).log2().floor()
    code = (exponent + 6) * 8 + (size * power_of_two(3 - exponent)).round()  # a value that rounds up to 2^(e + 1) too
    return (code + 128 * (x < 0)).to(torch.uint8)


def float8_values(codes: Tensor) -> Tensor:
    """The float32 values of bytes of float8 e4m3, without NaN."""
    x = codes.float()
    negative = x >= 128
    x = x - 128 * negative
    exponent = (x / 8).floor()  # 0: multiples of 2^−9, as in the binade above
    size = (x - 8 * exponent + 8 * (exponent > 0)) * power_of_two(exponent.clamp(min=1) - 10)
    return torch.where(negative, -size, size)


def power_of_two(x: Tensor) -> Tensor:
    return torch.pow(2.0, x)  # ExecuTorch has no exp2


def _unquantized(field: Field) -> None:
    """The format "plain"."""
    return


def hadamard(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 32-wide Hadamard matrix, divided by √32: symmetric, and its own inverse."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < GROUP:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix / math.sqrt(GROUP)


def fill_value(part: Tensor, value: float) -> float:
    """`value` for a floating-point part; the largest integer otherwise, because integers have no NaN."""
    return value if part.is_floating_point() else torch.iinfo(part.dtype).max


def _half(x: Tensor) -> Tensor:
    """x rounded to float16, in the dtype of x."""
    return x.clamp(-65504, 65504).half().to(x.dtype)


def _half_above(x: Tensor) -> Tensor:
    """A float16 value that is at least x >= 0; 0 for 0."""
    return _half(x * (1 + 2.0**-10) + SMALLEST / 2)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for 0"""
    return torch.where(scale > 0, 1 / scale, 0)


for _bits in WIDTHS:
    register_built_in(_bits, partial(Grouped, bits=_bits))
register_built_in("fp8", Float8)
register_built_in("plain", _unquantized)
