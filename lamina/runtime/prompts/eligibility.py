"""Eligibility for captured prompts: the reason, in words, why none is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.cache.layers.base import Layer
from lamina.cache.spec import (
    Attention,
    Convolution,
    Cross,
    IndexKeys,
    Latent,
    Recurrent,
    Shared,
    SharedIndex,
    Spec,
    Tokens,
)
from lamina.kernels.eligibility import why_no_attention, why_no_index, why_no_vectors
from lamina.runtime.eligibility import why_not_captured, why_not_read
from lamina.runtime.gpu.backend import RULES, kernels_for_prompts

if TYPE_CHECKING:
    import torch

    from lamina.cache.cache import Cache
    from lamina.model import Model

WIDTHS = (32, 64, 128, 256, 384, 512)  # tokens per row that graphs are captured for
MOST_IN_ALL = 2048
"""Rows times tokens: beyond, kernels run longer than the host takes to launch them. It is the smallest width for the
most rows of captured steps: a prompt of more rows, captured, would be followed by plain steps, each of which costs the
host what the graph saved once."""


def why_no_prompts(model: Model, cache: Cache | None = None, rows: int = 1) -> str | None:
    """Why prompts are not read by captured graphs; None if they are, where they are short enough."""
    if reason := why_not_captured(model, cache, rows, why_unserved):
        return reason
    return model.graphs.why_counted()


def why_not_prompted(cache: Cache) -> str | None:
    """Why captured prompts cannot read this cache; None if they can."""
    return why_not_read(cache, why_unserved)


def why_unserved(spec: Spec, layer: Layer | None, dtype: torch.dtype) -> str | None:
    """Why captured prompts do not serve this entry, in words; None where they do."""
    match spec:
        case Attention() | Latent() | Cross():
            return why_no_attention(spec, None if layer is None else layer.coding.formats, dtype)
        case IndexKeys():
            return why_no_index(spec, None if layer is None else layer.coding.formats)
        case Tokens():
            return why_no_vectors(spec, None if layer is None else layer.coding.formats)
        case Shared() | SharedIndex() | Convolution():
            return None
        case Recurrent(rule=rule):
            if layer is None or not layer.slack or type(rule) in RULES:
                return None
            return f"its slack is {layer.slack}, and no kernel moves the base state of the rule {type(rule).__name__}"
    if (outside := kernels_for_prompts(spec)) is not None:
        return outside.why_not(spec, layer, dtype)
    return f"captured prompts have no kernel for {type(spec).__name__}"
