"""Eligibility for native steps: the reason, in words, why one is not used on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.native import library
from lamina.native.arguments import TYPES
from lamina.runtime.native.backend import why_unserved

if TYPE_CHECKING:
    from lamina.cache.cache import Cache
    from lamina.model import Model

MOST_ROWS = 64


def why_not_native(model: Model, cache: Cache | None = None, rows: int = 1) -> str | None:
    """Why decode steps are not native programs; None if they are."""
    if cache is not None and cache.recomputes:
        return "without a cache every pass recomputes whole rows"
    if model.uncaptured is not None:
        return model.uncaptured
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}; native steps run on a CPU"
    if model.dtype not in TYPES:
        return f"the model is in {str(model.dtype).removeprefix('torch.')}; native kernels compute in float32"
    if cache is not None and cache.fetcher is not None:
        return 'its cache has residence "host"; a native step reads memory of the device, which is the same here'
    rows = rows if cache is None else cache.rows
    if rows > MOST_ROWS:
        return f"{rows} rows; native steps are for up to {MOST_ROWS}"
    for i, entry in enumerate(model.specs):
        for name, spec in entry.items():
            layer = None if cache is None else cache.layers[i][name]
            if reason := why_unserved(spec, layer, model.dtype):
                return f"layer {i} entry {name!r}: {reason}"
    if reason := library.why_not():
        return f"{reason}; `lamina build` builds the native kernels"
    return None
