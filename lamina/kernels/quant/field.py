"""How the keys or values of an entry are quantized, and the quantized tokens of one pass, as the host hands them on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.cache.codec.formats import FieldFormat
from lamina.cache.codec.registry import FormatName
from lamina.errors import InputError
from lamina.kernels.eligibility import why_no_format
from lamina.kernels.quant.layout import code_bytes, high_bytes, scale_values


@dataclass(frozen=True)
class Side:
    """The format of one field, keys or values, as kernels take it.

    form       bits per code (8, 6, 5, 4), "fp8", or "plain" for values that are not quantized
    dim        values per head
    hadamard   whether whole groups are rotated by the Hadamard matrix before they are quantized
    centre     the key mean that is subtracted first, float32 [H, D]
    """

    form: FormatName
    dim: int
    hadamard: bool = False
    centre: Tensor | None = None

    @classmethod
    def of(cls, chosen: FieldFormat | None, dim: int) -> Side:
        """For a field that a codec quantizes in this format, or plain where it is None."""
        if chosen is None:
            return cls("plain", dim)
        if (reason := why_no_format(chosen)) or chosen.kernel_layout is None:
            raise InputError(reason)
        mean = None if chosen.key_mean is None else chosen.key_mean.float().reshape(-1, dim).contiguous()
        return cls(chosen.kernel_layout, dim, chosen.rotation is not None, mean)

    def empty(self, like: Tensor, heads: int, tokens: int) -> Parts:
        """Uninitialized parts for new tokens, in the layout of a store with one slot per token; like [B, ...]."""
        lead = like.shape[0], heads, tokens

        def allocate(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*lead, max(width, 1), dtype=dtype, device=like.device)

        if self.form == "plain":
            codes = allocate(self.dim, like.dtype)
            return Parts(codes, codes, codes)
        codes, high = allocate(code_bytes(self.dim, self.form), torch.uint8), high_bytes(self.dim, self.form)
        scales = allocate(scale_values(self.dim, self.form), torch.float16)
        return Parts(codes, scales, allocate(high, torch.uint8) if high else codes)


@dataclass(frozen=True)
class Parts:
    """The quantized new tokens of one field, [B, H, T, width] each."""

    codes: Tensor  # uint8, or the values where the field is plain
    scales: Tensor  # float16
    high: Tensor  # uint8: the bits above the fourth


@dataclass(frozen=True)
class Coded:
    """The input of attention over codes: prepared queries, and the new tokens, quantized."""

    q: Tensor  # [B, Hq, T, D]
    query_terms: Tensor  # [B, T, Hq, 2 + groups] float32: largest magnitude, product with key mean, sums of groups
    k: Parts
    v: Parts
    keys: Side
    values: Side
    stored: bool  # whether the new tokens are in their slots; otherwise they are in k and v
