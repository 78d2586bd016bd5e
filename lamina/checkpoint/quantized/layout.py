"""`Layout`: under which names a method stores the parts of a weight, and how they become a `PackedWeight`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lamina.weights.packed import PackedWeight

Settings = Mapping[str, Any]
"""quantization_config of a config.json"""


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
    pack: Callable[[dict[str, Tensor], Settings, str], PackedWeight]
    ending: str = ""
    fn: Callable[[Tensor], Tensor] | None = None
    values: tuple[str, ...] = ()

    def find(self, names: set[str]) -> dict[str, dict[str, str]]:
        """Weight -> part -> tensor, for every weight that has all required parts."""
        mark = next(suffix for suffix, part in self.suffixes.items() if part == self.required[-1])
        bases = [name.removesuffix(suffix) for name in names for suffix in self._marks(mark) if name.endswith(suffix)]
        found: dict[str, dict[str, str]] = {}
        for base in bases:
            parts = {part: base + suffix for suffix, part in self.suffixes.items() if base + suffix in names}
            if all(part in parts for part in self.required):
                found[base + self.ending] = parts
        return found

    def _marks(self, mark: str) -> list[str]:
        """Suffixes of the part by which a quantized weight is recognized."""
        return [suffix for suffix, part in self.suffixes.items() if part == self.suffixes[mark]]
