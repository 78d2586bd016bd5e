"""A pytest plugin: in its process transformers' DynamicCache and StaticCache are `lamina.bridge.Cache`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import transformers
from transformers import cache_utils

from lamina import bridge

LAYERS = 64  # of a DynamicCache that is made without a configuration


class DynamicCache(bridge.Cache):
    """Our cache behind the arguments of transformers' DynamicCache."""

    def __init__(
        self, ddp_cache_data: Iterable[Any] | None = None, config: Any = None, offloading: bool = False, **unused: Any
    ) -> None:
        data = None if ddp_cache_data is None else list(ddp_cache_data)
        layers = LAYERS if data is None else len(data)
        known = config or transformers.LlamaConfig(num_hidden_layers=layers)
        super().__init__(known, residence="host" if offloading else "device")
        for i, (keys, values, *_) in enumerate(data or ()):
            if keys is not None:
                self.update(keys, values, i)


class StaticCache(bridge.Cache):
    """Our cache behind the arguments of transformers' StaticCache."""

    def __init__(self, config: Any, max_cache_len: int, offloading: bool = False, **unused: Any) -> None:
        super().__init__(config, capacity=max_cache_len, residence="host" if offloading else "device")


def substitute() -> None:
    """Replaces the two classes in every module of transformers that is loaded, or will be."""
    for name, ours in (("DynamicCache", DynamicCache), ("StaticCache", StaticCache)):
        theirs = getattr(cache_utils, name)
        for module in list(sys.modules.values()):
            inside = module is not None and module.__name__.startswith("transformers")
            if inside and module.__dict__.get(name) is theirs:
                setattr(module, name, ours)
        setattr(transformers, name, ours)


substitute()
