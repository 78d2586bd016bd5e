"""Packed weights: the formats in which matrices are stored, the modules that hold them, and products with them"""

from lamina.weights import fp8, gguf_blocks, gguf_k, int_groups  # noqa: F401  (they register their formats)
from lamina.weights.format import FORMATS, WeightFormat, register, weight_format, writable
from lamina.weights.inventory import named_weights, own_weights, packed_formats, weight_bytes
from lamina.weights.packed import JoinedWeight, Packed, PackedWeight, along_rows, stacked
from lamina.weights.product import has_kernels, kernels_of, packed_linear, use_kernels

__all__ = [
    "FORMATS",
    "JoinedWeight",
    "Packed",
    "PackedWeight",
    "WeightFormat",
    "along_rows",
    "has_kernels",
    "kernels_of",
    "named_weights",
    "own_weights",
    "packed_formats",
    "packed_linear",
    "register",
    "stacked",
    "use_kernels",
    "weight_bytes",
    "weight_format",
    "writable",
]  # fmt: skip
