"""The bridge to transformers: its models over Lamina's caches. transformers is imported when one of these is used.

cache = lamina.bridge.Cache(hf_model, codec="int8")
hf_model.generate(ids, past_key_values=cache)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamina.bridge.attention import attend
    from lamina.bridge.cache import Cache
    from lamina.bridge.encoder_decoder import EncoderDecoderCache
    from lamina.bridge.files import load_cache
    from lamina.bridge.pool import Pool

__all__ = ["Cache", "EncoderDecoderCache", "Pool", "attend", "load_cache"]

_HOMES = {
    "Cache": "cache",
    "EncoderDecoderCache": "encoder_decoder",
    "Pool": "pool",
    "attend": "attention",
    "load_cache": "files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
