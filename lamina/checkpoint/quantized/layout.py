"""`Layout`: under which names a method stores the parts of a weight, and how they become a `PackedWeight`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lamina.checkpoint.quantized.code_order import Room
from lamina.errors import CheckpointError
from lamina.weights.packed import PackedWeight

Settings = Mapping[str, Any]
"""quantization_config of a config.json"""


class Pack(Protocol):
    def __call__(
        self, parts: dict[str, Tensor], settings: Settings, name: str, room: Room | None = None
    ) -> PackedWeight:
        """name: of the weight, for errors; room: for codes that are put into another order"""


@dataclass(frozen=True)
class Layout:
    """
    suffixes   what tensor names of a weight end in -> part; the rest of the name is the same for all parts
    required   parts that every quantized weight has
    pack       (parts, settings, name of the weight) -> the weight; it also runs on meta tensors, so it looks at no
               values but those of `values`
    ending     what follows the common part of the names in the name of the weight
    fn         how the weight differs from the one in a plain checkpoint; None: not at all
    values     parts that are read even if only shapes are asked for
    """

    suffixes: Mapping[str, str]
    required: tuple[str, ...]
    pack: Pack
    ending: str = ""
    fn: Callable[[Tensor], Tensor] | None = None
    values: tuple[str, ...] = ()

    def find(self, names: set[str]) -> dict[str, dict[str, str]]:
        """Weight -> part -> tensor, for every weight that has all required parts."""
        return {
            base + self.ending: parts
            for base, parts in self._candidates(names).items()
            if all(part in parts for part in self.required)
        }

    def incomplete(self, names: set[str]) -> dict[str, tuple[str, list[str]]]:
        """Weight -> the tensor with its codes, and those that it lacks, for every weight without a required part."""
        found = {}
        for base, parts in self._candidates(names).items():
            lacking = [
                base + suffix for suffix, part in self.suffixes.items() if part in self.required if part not in parts
            ]
            if lacking:
                found[base + self.ending] = parts["codes"], lacking
        return found

    def _candidates(self, names: set[str]) -> dict[str, dict[str, str]]:
        """What the names of a weight begin with -> part -> tensor, for every name that ends as codes do."""
        mark = next(suffix for suffix, part in self.suffixes.items() if part == "codes")
        bases = [name.removesuffix(mark) for name in names if name.endswith(mark)]
        return {
            base: {part: base + suffix for suffix, part in self.suffixes.items() if base + suffix in names}
            for base in bases
        }


def check_finite(scales: Tensor, what: str) -> None:
    """Raises CheckpointError if a scale is NaN or infinite; `what` names the tensor and its format."""
    if scales.is_meta or bool(scales.sum(dtype=torch.float64).isfinite()):
        return
    wrong = (~scales.isfinite()).nonzero().tolist()
    raise CheckpointError(f"{what}: {len(wrong)} of its {scales.numel()} scales are NaN or infinite, first {wrong[0]}")


def check_parts(words: Tensor, zeros: Tensor | None, scales: Tensor, name: str) -> None:
    """Raises CheckpointError if codes or zeros are not words, or scales are not floating-point numbers."""
    for what, part in (("codes", words), ("zeros", zeros)):
        if part is not None and part.dtype not in (torch.int32, torch.int8):
            raise CheckpointError(f"{name} has {what} in {part.dtype}; they are read in int32")
    if not scales.dtype.is_floating_point:
        raise CheckpointError(f"{name} has scales in {scales.dtype}, which is no floating-point type")
