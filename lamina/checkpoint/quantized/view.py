"""`QuantizedCheckpoint`: a folder with quantized weights, shown under the names that it would have without.

Each quantized weight is one tensor, `x.weight`, in place of its parts (`x.qweight`, `x.scales` …). Reading it
dequantizes; `packed` gives it in the format of `lamina/weights` that holds the same values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import torch

from lamina.checkpoint.packing import PackedTensors
from lamina.checkpoint.quantized.float_layouts import FLOAT8, GPT_OSS
from lamina.checkpoint.quantized.int_layouts import AWQ, COMPRESSED, GPTQ, INT_QUANTIZED
from lamina.checkpoint.quantized.layout import Layout, Settings
from lamina.checkpoint.source import Checkpoint, nested_configs
from lamina.errors import CheckpointError
from lamina.notices import notice

if TYPE_CHECKING:
    from lamina.checkpoint.quantized.code_order import Room
    from lamina.checkpoint.tokenizer import Tokenizer
    from lamina.weights.packed import PackedWeight

METHODS: dict[str, tuple[Layout, ...]] = {
    "awq": (AWQ,),
    "gptq": (GPTQ,),
    "compressed-tensors": (COMPRESSED, INT_QUANTIZED, FLOAT8),
    "fp8": (FLOAT8,),
    "fbgemm_fp8": (FLOAT8,),
    "mxfp4": (GPT_OSS,),
}
"""quant_method of a configuration -> how its weights are stored"""
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)
BESIDE = re.compile(r".+\.(input|output|[kqv]|activation)_(scale|zero_point|scale_inv)")
"""Tensors for quantized activations and caches, which are not used."""
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class QuantizedCheckpoint(Checkpoint):
    """A view of a checkpoint. `settings` is its quantization_config."""

    def __init__(self, whole: Checkpoint, settings: Settings) -> None:
        self.whole, self.path, self.settings = whole, whole.path, settings
        self.config, self.generation_config = whole.config, whole.generation_config
        names = set(whole.names)
        self._weights: dict[str, tuple[Layout, dict[str, str]]] = {}
        used: set[str] = {name for name in names if BESIDE.fullmatch(name)}
        for layout in METHODS[settings["quant_method"]]:
            for name, parts in layout.find(names - used).items():
                if self._fits(layout, parts):
                    self._weights[name] = layout, parts
                    used.update(parts.values())
        self._refuse_incomplete(names - used)
        self._names = (names - used) | self._weights.keys()
        if not self._weights:
            raise CheckpointError(
                f"{self.path} says that its weights are quantized with {settings['quant_method']!r}, and has no "
                "tensors of that; remove quantization_config from its config.json if they are plain"
            )

    def _refuse_incomplete(self, names: set[str]) -> None:
        """Raises CheckpointError if there are codes without scales. Codes under the name of a weight are known by their
        type."""
        method = self.settings["quant_method"]
        for layout in METHODS[method]:
            for name, (codes, lacking) in sorted(layout.incomplete(names).items()):
                if layout.suffixes.get("") != "codes" or self.whole.dtype(codes) in EIGHT_BITS:
                    dtype = str(self.whole.dtype(codes)).removeprefix("torch.")
                    found = f"{name} is quantized with {method} ({codes}, {dtype})"
                    raise CheckpointError(f"{self.path}: {found} and lacks {' or '.join(lacking)}")

    def _fits(self, layout: Layout, parts: Mapping[str, str]) -> bool:
        """float8 and int8 have the same names in compressed-tensors."""
        dtype = self.whole.dtype(parts["codes"])
        return (dtype == torch.int8) == (layout is INT_QUANTIZED)

    @property
    def names(self) -> Set[str]:
        return self._names

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.whole.eos_ids

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._weights:
            return self.whole.shape(name)
        fn, packed = self._weights[name][0].fn, self._pack(name, torch.device("meta"))
        return tuple(packed.shape if fn is None else fn(torch.empty(packed.shape, device="meta")).shape)

    def dtype(self, name: str) -> torch.dtype | None:
        return None if name in self._weights else self.whole.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._weights:
            return self.whole.read(name)
        fn, values = self._weights[name][0].fn, self._pack(name, torch.device("cpu")).dense(torch.float32)
        return values if fn is None else fn(values)

    def packed(self, name: str, device: torch.device, room: Room | None = None) -> PackedTensors | None:
        if name not in self._weights:
            return None
        place = device if device.type == "meta" else torch.device("cpu")
        return PackedTensors((self._pack(name, place, room),), self._weights[name][0].fn)

    def tokenizer(self) -> Tokenizer | None:
        return self.whole.tokenizer()

    def _pack(self, name: str, device: torch.device, room: Room | None = None) -> PackedWeight:
        layout, stored = self._weights[name]
        parts = {part: self._part(tensor, part in layout.values, device) for part, tensor in stored.items()}
        try:
            return layout.pack(parts, self.settings, f"{self.path}: {name}", room)
        except CheckpointError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            found = ", ".join(f"{tensor} {list(self.whole.shape(tensor))}" for tensor in stored.values())
            how = self.settings["quant_method"]
            raise CheckpointError(f"{self.path}: {name} cannot be read as {how}: {found} ({error})") from error

    def _part(self, tensor: str, values: bool, device: torch.device) -> torch.Tensor:
        if device.type != "meta" or values:
            return self.whole.read(tensor)
        return torch.empty(self.whole.shape(tensor), dtype=self.whole.dtype(tensor), device="meta")


def quantization_of(config: dict[str, Any]) -> Mapping[str, Any] | None:
    """The settings of quantization in a configuration, also in that of a text model inside it."""
    for part in (config, *nested_configs(config)):
        for field in ("quantization_config", "compression_config"):
            if isinstance(found := part.get(field), Mapping) and found.get("quant_method"):
                return found
    return None


def method_of(config: dict[str, Any]) -> str | None:
    """The quant_method of a configuration, if its weights can be read whatever the family.

    >>> method_of({"quantization_config": {"quant_method": "awq"}}), method_of({})
    ('awq', None)
    """
    settings = quantization_of(config)
    return settings["quant_method"] if settings is not None and settings["quant_method"] in METHODS else None


def with_weights(whole: Checkpoint) -> Checkpoint:
    """The checkpoint, with quantized weights under the names of plain ones if its configuration says how."""
    settings = quantization_of(whole.config)
    if settings is None or settings["quant_method"] not in METHODS:
        return whole
    format = settings.get("format", "pack-quantized")
    if settings["quant_method"] == "compressed-tensors":
        if format not in COMPRESSED_FORMATS:
            raise CheckpointError(
                f"{whole.path} is compressed-tensors in the format {format!r}; read are {', '.join(COMPRESSED_FORMATS)}"
            )
        if any(group.get("input_activations") for group in (settings.get("config_groups") or {}).values()):
            notice(f"{whole.path} also quantizes activations; here they stay as they are")
    return QuantizedCheckpoint(whole, settings)
