"""Why a fast path is not taken, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lamina import kernels
from lamina.cache.layers.base import Layer
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.spec import Attention, Convolution, Latent, LayerSpecs, Recurrent, Spec
from lamina.kernels.eligibility import why_no_attention
from lamina.recurrence import SSD, GatedDelta, SelectiveScan

if TYPE_CHECKING:
    from lamina.cache.cache import Cache
    from lamina.model import Model

MOST_ROWS = 64
MOST_TOKENS = 16  # of a row in a captured pass
ON_THE_HOST = "its bytes live on the host; a captured step reads what is on the device"


def why_not_captured(model: Model, cache: Cache | None = None, rows: int = 1) -> str | None:
    """Why decoding is not captured in one graph; None when it is."""
    if cache is not None and cache.forgets:
        return "without a cache every pass runs whole rows"
    if model.device.type != "cuda":
        return f"the model is on {model.device.type}; decode steps are captured on a GPU"
    if reason := kernels.why_not(next(model.parameters())):
        return reason
    if cache is not None and cache.fetcher is not None:
        return ON_THE_HOST
    rows = rows if cache is None else cache.rows
    if rows > MOST_ROWS:
        return f"{rows} rows; the kernels of a captured step are for up to {MOST_ROWS}"
    return why_no_kernels(model.specs, None if cache is None else cache.layers, model.dtype)


def most_tokens(rows: int) -> int:
    """How many tokens a row may have in a captured pass of so many rows; a power of two.

    >>> most_tokens(1), most_tokens(5), most_tokens(64)
    (16, 8, 1)
    """
    return min(MOST_TOKENS, 1 << (MOST_ROWS // rows).bit_length() - 1) if rows <= MOST_ROWS else 0


def why_no_passes(model: Model, cache: Cache) -> str | None:
    """Why passes of several tokens over this cache are not captured; None when they are."""
    if reason := why_not_captured(model, cache):
        return reason
    if most_tokens(cache.rows) < 2:
        return f"{cache.rows} rows; captured passes are of up to {MOST_ROWS} tokens, so of one for each row"
    return why_not_read(cache)


def why_not_read(cache: Cache) -> str | None:
    """The first entry of a cache that no captured pass of several tokens reads, in words; None when all are read."""
    if cache.fetcher is not None:
        return ON_THE_HOST
    return why_no_kernels(cache.specs, cache.layers, cache.dtype)


def why_no_kernels(
    specs: Sequence[LayerSpecs],
    layers: Sequence[Mapping[str, Layer]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> str | None:
    """The first layer that no kernel of a captured step serves, in words; None when all are served."""
    for i, entry in enumerate(specs):
        for name, spec in entry.items():
            if reason := _unserved(spec, None if layers is None else layers[i][name], dtype):
                return f"layer {i} entry {name!r}: {reason}"
    return None


def _unserved(spec: Spec, layer: Layer | None, dtype: torch.dtype) -> str | None:
    match spec:
        case Attention() | Latent():
            return why_no_attention(spec, layer.coding.formats if isinstance(layer, TokenLayer) else None, dtype)
        case Convolution():
            return None
        case Recurrent(rule=SSD() | SelectiveScan() | GatedDelta()):
            slack = getattr(layer, "slack", 0)
            return f"its slack is {slack}; a captured step keeps no log of inputs to go back to" if slack else None
    return f"there is no kernel for {type(spec).__name__}"
