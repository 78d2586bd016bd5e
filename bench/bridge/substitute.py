"""A pytest plugin: in its process transformers' DynamicCache and StaticCache are `lamina.bridge.Cache`, and in the test
modules the layer classes whose names tests compare with are those of our layers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import transformers
from transformers import cache_utils

from lamina import bridge
from lamina.bridge.layers.views import AttentionView, HybridView, LinearView

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


CACHES = {"DynamicCache": DynamicCache, "StaticCache": StaticCache}
LAYER_TYPES = {
    "LinearAttentionLayer": LinearView,
    "LinearAttentionAndFullAttentionLayer": HybridView,
    "LinearAttentionAndSlidingWindowAttentionLayer": HybridView,
    "StaticLayer": AttentionView,
}


def substitute() -> None:
    """Replaces the two caches in every module of transformers that is loaded, or will be."""
    for name, ours in CACHES.items():
        theirs = getattr(cache_utils, name)
        for module in list(sys.modules.values()):
            inside = module is not None and module.__name__.startswith("transformers")
            if inside and module.__dict__.get(name) is theirs:
                setattr(module, name, ours)
        setattr(transformers, name, ours)


def pytest_collection_finish() -> None:
    """Replaces the layer classes in the test modules, which compare the types of layers with them."""
    for name, ours in LAYER_TYPES.items():
        theirs = getattr(cache_utils, name, None)
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("tests.") and theirs is not None and getattr(module, name, None) is theirs:
                setattr(module, name, ours)


substitute()
