"""Packed weights of `lamina.weights` as the kernels read them, and which of them the kernels read.

This module does not import Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lamina.errors import InputError
from lamina.kernels.packed.matrix import Kind, PackedMatrix
from lamina.weights.fp8 import Fp8
from lamina.weights.int_groups import IntGroups
from lamina.weights.packed import Packed, PackedWeight, every_module
from lamina.weights.repack import SplitMXFP4

if TYPE_CHECKING:
    from torch import nn


def matrix_of(weight: PackedWeight) -> PackedMatrix:
    """The same memory as a matrix for the kernels; InputError if they do not read its format.

    A permutation of the columns (`order`) is not part of it: x is permuted instead.
    """
    parts, k = weight.parts, weight.shape[-1]
    if isinstance(weight.format, IntGroups):
        kind: Kind = "int8" if weight.format.bits == 8 else "int4"
        return PackedMatrix(
            kind, parts["codes"], parts["scales"], weight.format.group, parts.get("zeros"), parts.get("offsets")
        )
    if isinstance(weight.format, Fp8):
        codes, rows, group = parts["codes"].view(torch.uint8), weight.format.rows_each, weight.format.columns or k
        return PackedMatrix("fp8", codes, parts["scales"], group, side=max(rows, 1))
    if isinstance(weight.format, SplitMXFP4):
        return PackedMatrix("mxfp4", parts["codes"], parts["scales"], 32)
    raise InputError(f"no kernel of the GPU reads the weight format {weight.format}")


def stack_of(weight: Packed) -> PackedMatrix:
    """The matrices of all experts, [E, M, K], as one matrix [E · M, K]; InputError if the kernels do not read it."""
    if len(weight.segments) > 1:
        raise InputError(f"no kernel reads experts whose rows differ in their formats ({', '.join(weight.formats)})")
    only = weight.segments[0]
    experts, rows, k = only.shape
    if "order" in only.parts:
        raise InputError("no kernel reads experts with a permutation of their columns")
    if isinstance(only.format, Fp8) and (only.format.rows_each == 0 or rows % only.format.rows_each):
        raise InputError(f"no kernel reads experts of {rows} rows in {only.format}")
    flat = {name: part.flatten(0, 1) for name, part in only.parts.items()}
    return matrix_of(PackedWeight(only.format, flat, (experts * rows, k), only.dtype))


def why_unread(weight: Packed) -> str | None:
    """Why no kernel reads this weight; None if kernels do."""
    try:
        if weight.ndim == 3:
            stack_of(weight)
        else:
            for segment in weight.segments:
                matrix_of(segment)
    except InputError as reason:
        return str(reason)
    return None


def why_model_unread(model: nn.Module) -> str | None:
    """The first packed weight of a model that no kernel of a captured step reads, in words; None if all are read."""
    if not any(issubclass(kind, PackedWeight) for kind in set(map(type, every_module(model)))):
        return None
    for path, module in model.named_modules():
        for name, weight in module._modules.items():
            if not isinstance(weight, Packed):
                continue
            where = f"{path}.{name}" if path else name
            if reason := why_unread(weight):
                return f"{where}: {reason}"
            if weight.ndim == 3 and any(one is not None and one.dim() == 3 for one in module._parameters.values()):
                return f"{where}: no kernel reads experts of which some matrices are packed and others are not"
    return None
