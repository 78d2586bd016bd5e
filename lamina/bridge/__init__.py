"""The bridge to transformers: its models over Lamina's caches. transformers is imported here alone.

cache = lamina.bridge.Cache(hf_model, codec="int8")
hf_model.generate(ids, past_key_values=cache)
"""

from lamina.bridge.attention import attend
from lamina.bridge.cache import Cache
from lamina.bridge.encoder_decoder import EncoderDecoderCache
from lamina.bridge.files import load_cache
from lamina.bridge.pool import Pool

__all__ = ["Cache", "EncoderDecoderCache", "Pool", "attend", "load_cache"]
