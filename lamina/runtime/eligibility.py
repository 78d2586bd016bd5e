"""Eligibility for captured steps and passes: the reason, in words, why one is not used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lamina import kernels
from lamina.cache.layers.base import Layer
from lamina.cache.spec import LayerSpecs, Spec
from lamina.native.linear import why_no_native_products
from lamina.nn.linear import packed_on_cpu
from lamina.runtime.gpu.backend import why_unserved
from lamina.runtime.native.eligibility import why_not_native
from lamina.weights.inventory import packed_formats
from lamina.weights.product import has_kernels, kernels_of

if TYPE_CHECKING:
    from lamina.cache.cache import Cache
    from lamina.model import Model

MOST_ROWS = 64
MOST_TOKENS = 16  # per row in a captured pass
ON_THE_HOST = "its cache is stored on the host; a captured step reads device memory"


Unserved = Callable[[Spec, Layer | None, torch.dtype], str | None]
"""Why a backend does not serve an entry of this spec, layer and dtype of the model; None where it does."""


def why_not_captured(
    model: Model, cache: Cache | None = None, rows: int = 1, unserved: Unserved = why_unserved
) -> str | None:
    """Why decode steps are not captured in a CUDA graph; None if they are.

    unserved   asked for each entry; those of captured prompts differ
    """
    if cache is not None and cache.recomputes:
        return "without a cache every pass recomputes whole rows"
    if model.uncaptured is not None:
        return model.uncaptured
    if reason := why_no_graphs(model):
        return reason
    if reason := model.graphs.why_unread():
        return f'{reason}; load(weights="plain") dequantizes'
    if cache is not None and cache.fetcher is not None:
        return ON_THE_HOST
    rows = rows if cache is None else cache.rows
    if rows > MOST_ROWS:
        return f"{rows} rows; captured steps, and so captured prompts, have up to {MOST_ROWS}"
    if cache is None:
        return why_no_kernels(model.specs, None, model.dtype, unserved)
    return why_no_kernels(cache.specs, cache.layers, model.dtype, unserved)


def why_no_graphs(model: Model) -> str | None:
    """Why nothing is captured in CUDA graphs on the model's device; None on a GPU that kernels run on."""
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}; decode steps are captured on a GPU"
    return kernels.why_not(next(model.parameters()))


def how_packed(model: Model) -> str | None:
    """Which weights are packed and how products with them are computed; None if none is."""
    if not (formats := packed_formats(model)):
        return None
    device = model.device.type
    reason = "there are no kernels" if not has_kernels(device) else None
    how = "kernels that read them"
    if device == "cpu" and kernels_of(device) is packed_on_cpu:
        reason = why_no_native_products()
        how = f"native kernels with {model.activations} activations, in prompts and in steps"
    if reason is not None:
        how = f"dequantizing blocks of rows in PyTorch, since {reason}"
    return f"{', '.join(f'{name} ({count})' for name, count in formats.items())}; products on {device} by {how}"


def why_no_step(model: Model, cache: Cache | None, reason: str, rows: int = 1) -> str | None:
    """Why decode steps are plain passes; None if they are native programs, as on a CPU.

    reason   why they are not captured in a CUDA graph
    """
    return why_not_native(model, cache, rows) if model.device.type == "cpu" else reason


def most_tokens(rows: int) -> int:
    """The most tokens per row in a captured pass of `rows` rows; a power of two.

    >>> most_tokens(1), most_tokens(5), most_tokens(64)
    (16, 8, 1)
    """
    return min(MOST_TOKENS, 1 << (MOST_ROWS // rows).bit_length() - 1) if rows <= MOST_ROWS else 0


def why_no_passes(model: Model, cache: Cache) -> str | None:
    """Why passes of several tokens over this cache are not captured; None if they are."""
    if reason := why_not_captured(model, cache):
        return reason
    if most_tokens(cache.rows) < 2:
        return f"{cache.rows} rows; captured passes have up to {MOST_ROWS} tokens in all, so one per row here"
    return why_not_read(cache)


def why_not_read(cache: Cache, unserved: Unserved = why_unserved) -> str | None:
    """Why captured passes of several tokens cannot read this cache; None if they can."""
    if cache.fetcher is not None:
        return ON_THE_HOST
    return why_no_kernels(cache.specs, cache.layers, cache.dtype, unserved)


def why_no_kernels(
    specs: Sequence[LayerSpecs],
    layers: Sequence[Mapping[str, Layer]] | None = None,
    dtype: torch.dtype = torch.float32,
    unserved: Unserved = why_unserved,
) -> str | None:
    """The first layer that no kernel of a captured step supports, in words; None if all are supported."""
    served: set[tuple[int, int, int]] = set()  # spec, coding and slack of supported layers: equal ones are not asked
    for i, entry in enumerate(specs):
        for name, spec in entry.items():
            layer = None if layers is None else layers[i][name]
            if layer is not None and (kind := (id(layer.spec), id(layer.coding), layer.slack)) in served:
                continue
            if reason := unserved(spec, layer, dtype):
                return f"layer {i} entry {name!r}: {reason}"
            if layer is not None:
                served.add(kind)
    return None
