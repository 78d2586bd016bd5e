"""The bridge to transformers: its models over Lamina's caches. transformers is imported here alone.

    cache = lamina.bridge.Cache(hf_model, codec="int8")
    hf_model.generate(ids, past_key_values=cache)
"""

from lamina.bridge.cache import Cache
from lamina.bridge.encoder_decoder import EncoderDecoderCache

__all__ = ["Cache", "EncoderDecoderCache"]
