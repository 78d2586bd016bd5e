"""Checks of the arguments of `generate` and `stream` that are not settings: cache, attention_mask, prefixes …"""

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

# name: (check, what the value must be)
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "attention_mask": (lambda given: isinstance(given, Tensor | np.ndarray | list), "a tensor of 0 and 1"),
    "decoder_attention_mask": (lambda given: isinstance(given, Tensor | np.ndarray | list), "a tensor of 0 and 1"),
    "inputs_embeds": (
        lambda given: isinstance(given, Tensor | Sequence) and not isinstance(given, str),
        "a tensor [B, T, width] or a list of tensors [T, width]",
    ),
    "chat_options": (lambda given: isinstance(given, Mapping), "a mapping of variables for the chat template"),
    "cache": (lambda given: isinstance(given, Cache), "a cache, as model.new_cache() and result.cache are"),
    "whole": (lambda given: isinstance(given, bool), "True, False or None"),
    "prefixes": (lambda given: isinstance(given, PrefixStore), "a lamina.PrefixStore"),
    "progress": (callable, "a function that is called as progress(done, total)"),
    "stream": (callable, "a function that is called with each event; model.stream(…) gives an iterator"),
}


def check_arguments(model: Model, given: Mapping[str, Any]) -> None:
    """Refuses arguments of the wrong type, and a cache of another model. None counts as not given."""
    for name, value in given.items():
        if name in KINDS and value is not None and not KINDS[name][0](value):
            raise InputError(f"{name}={short(value)}: it must be {KINDS[name][1]}")
    cache = given.get("cache")
    if cache is not None and cache.model is not model:
        raise InputError("this cache was made by another model; make one with this model's new_cache()")
