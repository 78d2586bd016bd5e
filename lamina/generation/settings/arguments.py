"""What `generate` and `stream` are given besides prompts and settings: each is of its kind, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.errors import InputError
from lamina.generation.prefix_store import PrefixStore
from lamina.generation.settings.validate import short

if TYPE_CHECKING:
    from lamina.model import Model

KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "attention_mask": (lambda given: isinstance(given, Tensor | np.ndarray | list), "a tensor of 0 and 1"),
    "decoder_attention_mask": (lambda given: isinstance(given, Tensor | np.ndarray | list), "a tensor of 0 and 1"),
    "inputs_embeds": (
        lambda given: isinstance(given, Tensor | Sequence) and not isinstance(given, str),
        "a tensor [B, T, width] or a list of tensors [T, width]",
    ),
    "chat_options": (lambda given: isinstance(given, Mapping), "a mapping of names to what the chat template gets"),
    "cache": (lambda given: isinstance(given, Cache), "a cache, as model.new_cache() and result.cache are"),
    "whole": (lambda given: isinstance(given, bool), "True, False or None"),
    "prefixes": (lambda given: isinstance(given, PrefixStore), "a lamina.PrefixStore"),
    "stream": (callable, "a function that is called with each event; model.stream(…) gives an iterator"),
}


def check_arguments(model: Model, given: Mapping[str, Any]) -> None:
    """Refuses what is of the wrong kind, and a cache of another model; None stands for nothing given."""
    for name, value in given.items():
        if name in KINDS and value is not None and not KINDS[name][0](value):
            raise InputError(f"{name}={short(value)}: it must be {KINDS[name][1]}")
    cache = given.get("cache")
    if cache is not None and cache.model is not model:
        raise InputError("this cache was made by another model; make one with this model's new_cache()")
