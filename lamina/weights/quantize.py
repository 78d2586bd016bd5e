"""Quantizes the plain weights of a model, and puts packed weights in the place of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lamina.errors import InputError
from lamina.weights.format import FORMATS, WeightFormat, weight_format, writable
from lamina.weights.int_groups import IntGroups
from lamina.weights.nibbles import LANES
from lamina.weights.packed import Packed, PackedWeight

PLAIN, PACKED = "plain", "packed"
INT8, FLOAT32 = "int8", "float32"  # activations of products with packed integer weights on a CPU
Owners = Sequence[tuple[nn.Module, str]]
"""Modules and attributes that a weight is known by: several if it is shared."""


def check_weights(weights: str) -> None:
    """Raises InputError unless `lamina.load(weights=…)` takes this."""
    if weights not in (PLAIN, PACKED, *writable()):
        listed = ", ".join(map(repr, writable()))
        known = f"; {weights} is read, not written" if weights in FORMATS else ""
        raise InputError(f"weights={weights!r} must be one of {PACKED!r}, {PLAIN!r}, {listed}{known}")


def check_activations(activations: str) -> None:
    """Raises InputError unless `lamina.load(activations=…)` takes this.

    >>> check_activations("float32")
    """
    if activations not in (INT8, FLOAT32):
        raise InputError(f"activations={activations!r} must be one of {INT8!r}, {FLOAT32!r}")


def packable(owners: Owners) -> bool:
    """True if every module that has the weight computes with packed ones."""
    return all(leaf in getattr(one, "packable", ()) for one, leaf in owners)


def format_for(weights: str, module: nn.Module, owners: Owners) -> WeightFormat:
    """Embedding and head have 8 bits where the rest has 4: they are read once, and decide the logits."""
    ends = any(isinstance(one, nn.Embedding) or one is getattr(module, "head", None) for one, _ in owners)
    return weight_format("int8" if weights == "int4" and ends else weights)


def fits(format: WeightFormat, width: int) -> bool:
    """True if rows of `width` values can be stored in a format."""
    return width % (max(format.group, LANES) if isinstance(format, IntGroups) else format.group) == 0


def put_packed(owners: Iterable[tuple[nn.Module, str]], packed: Packed) -> None:
    """Puts a packed weight where the parameter was."""
    for submodule, leaf in owners:
        delattr(submodule, leaf)
        setattr(submodule, leaf, packed)


def quantize_weights(module: nn.Module, weights: str) -> None:
    """Quantizes the matrices of a model in place: those of linear layers, embeddings and experts.

    weights   "int8", "int4" (embedding and head int8) or "fp8"

    >>> from lamina.nn import Linear
    >>> layer = Linear(64, 8)
    >>> quantize_weights(layer, "int8")
    >>> layer.weight
    PackedWeight(int8, groups of 32, [8, 64], 544 bytes)
    """
    check_weights(weights)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for one in module.modules():
        for leaf, parameter in one._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((one, leaf))
    for known in owners.values():
        quantize_weight(module, known, weights)


def quantize_weight(module: nn.Module, owners: Owners, weights: str) -> None:
    """Quantizes one weight of a model, unless its owners need it plain or its rows do not fit the format."""
    parameter: nn.Parameter = getattr(*owners[0])
    format = format_for(weights, module, owners)
    if packable(owners) and fits(format, parameter.shape[-1]):
        packed = PackedWeight(format, format.pack(parameter.detach()), parameter.shape, parameter.dtype)
        packed.activations = getattr(module, "activations", FLOAT32)  # of a model
        put_packed(owners, packed)
