"""`EncoderDecoderCache`: both halves of an encoder–decoder model's cache, in one Lamina cache."""

from __future__ import annotations

import os
from typing import Any

import transformers
from torch import Tensor

from lamina.bridge.cache import Cache
from lamina.bridge.layers.kinds import LayerKind
from lamina.bridge.layers.views import CrossView
from lamina.bridge.pool import Pool
from lamina.bridge.store import Store
from lamina.cache import cache as lamina_cache
from lamina.cache.codec.codec import Codecs
from lamina.errors import InputError


class CrossCache(transformers.Cache):
    """Keys and values of an encoder's output for each layer of the decoder, in the store of its other half."""

    def __init__(self, store: Store | None = None, **kwargs: Any) -> None:
        """store: None if a model asks for a cache without sliding windows (T5Gemma), which this one is anyway"""
        self.store = store
        kind = LayerKind("full_attention")
        layers = [] if store is None else [CrossView(store, i, kind) for i in range(len(store.kinds))]
        super().__init__(layers=layers)

    @property
    def batch_size(self) -> int:
        return -1 if self.store is None else self.store.rows or -1

    def crop(self, tokens_to_remove: int) -> None:
        """An encoder's output is never cropped."""

    # Rows change together with those of the other half.

    def reset(self) -> None:
        """See `EncoderDecoderCache.reset`."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See `EncoderDecoderCache.reorder_cache`."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `EncoderDecoderCache.batch_repeat_interleave`."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """See `EncoderDecoderCache.batch_select_indices`."""


class DecoderCache(Cache):
    """What the decoder of an encoder–decoder model remembers."""

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is allocated before the first pass: the shapes of the encoder's output are not known until then."""


class EncoderDecoderCache(transformers.EncoderDecoderCache):
    """The cache of an encoder–decoder model: what its decoder remembers, and the encoder's output. Arguments as for
    `lamina.bridge.Cache`; the capacity is that of the decoder.

    >>> cache = lamina.bridge.EncoderDecoderCache(model, codec="int8")                     # doctest: +SKIP
    >>> model.generate(ids, past_key_values=cache)                                         # doctest: +SKIP
    """

    self_attention_cache: DecoderCache

    def __init__(
        self,
        model_or_config: Any,
        capacity: int | None = None,
        codec: Codecs | None = None,
        residence: str = "device",
        slack: int = 0,
        pool: Pool | None = None,
    ) -> None:
        own = DecoderCache(model_or_config, capacity, codec, residence, slack, pool)
        self._cross = CrossCache(own.store)
        super().__init__(own, self._cross)

    @property
    def cross_attention_cache(self) -> CrossCache:
        """Keys and values of the encoder's output."""
        return self._cross

    @cross_attention_cache.setter
    def cross_attention_cache(self, cache: CrossCache) -> None:
        if not isinstance(cache, CrossCache):
            raise InputError(
                f"both halves of this cache are one: the cross-attention half cannot be replaced by {cache!r}"
            )

    def __repr__(self) -> str:
        return repr(self.self_attention_cache)

    def __deepcopy__(self, memo: dict[int, Any]) -> EncoderDecoderCache:
        return self.fork()

    @property
    def store(self) -> Store:
        return self.self_attention_cache.store

    @property
    def inner(self) -> lamina_cache.Cache:
        """The Lamina cache behind both halves, with every pass committed."""
        return self.store.inner

    @property
    def layers(self) -> list[Any]:
        """The layers of the decoder."""
        return self.self_attention_cache.layers

    @property
    def batch_size(self) -> int:
        return self.self_attention_cache.batch_size

    def check_dynamic_cache(self, method: str) -> None:
        """Every verb works on both halves."""

    def fork(self) -> EncoderDecoderCache:
        """An independent copy."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        own = self.self_attention_cache.fork()
        assert isinstance(own, DecoderCache)
        new.self_attention_cache = own
        new._cross = CrossCache(new.store)
        new.is_updated = dict(self.is_updated)
        return new

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes both halves to a file that `lamina.bridge.load_cache(path, model)` reads."""
        self.self_attention_cache.save(path)

    def abort(self) -> None:
        """Drops a pass that was not finished, such as one that raised an error; a finished one stays."""
        self.self_attention_cache.abort()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.self_attention_cache.get_query_offset(layer_idx)

    @property
    def is_linear(self) -> list[bool]:
        return self.self_attention_cache.is_linear

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.self_attention_cache.is_recording_past(layer_idx)

    @property
    def is_initialized(self) -> bool:
        return self.self_attention_cache.is_initialized

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """See `DecoderCache.early_initialization`."""
