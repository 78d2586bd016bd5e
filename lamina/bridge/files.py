"""Cache files of transformers models: `cache.save(path)` and `lamina.bridge.load_cache(path, model)`.

They are Lamina's cache files (cache/io/cache_file.py). A transformers model does not say what its layers remember, so
the configuration in the file has the specs too (model_facts.py).
"""

from __future__ import annotations

import json
import os
from typing import Any

from lamina.bridge.cache import Cache
from lamina.bridge.encoder_decoder import EncoderDecoderCache
from lamina.bridge.model_facts import STORED, ModelFacts, from_values
from lamina.bridge.pool import Pool
from lamina.bridge.store import Store
from lamina.cache.codec.codec import Codec
from lamina.cache.io import cache_file, checked_file
from lamina.errors import CacheFileError


def load_cache(
    path: str | os.PathLike[str], model_or_config: Any, residence: str = "device", pool: Pool | None = None
) -> Cache | EncoderDecoderCache:
    """The cache that `cache.save(path)` wrote, for the same model.

    residence   where its bytes live from now on, as for `lamina.bridge.Cache`
    pool        a `lamina.bridge.Pool` to store its tokens in

    >>> cache.save("talk.cache")                                                           # doctest: +SKIP
    >>> cache = lamina.bridge.load_cache("talk.cache", model)                              # doctest: +SKIP
    """
    with checked_file.open_file(path) as file:
        saved = json.loads(file.text)
    kept, stored = saved["kept"], saved["model"]["config"].get(STORED)
    if stored is None:
        raise CacheFileError(f"{path} was saved by a Lamina model: load it with lamina.load_cache(path, model)")
    codecs: dict[str | int, str | Codec] = {
        i: Codec(*names) for i, names in enumerate(kept["codecs"]) if Codec(*names) != Codec()
    }
    cache = Cache(model_or_config, kept["capacity"], codecs or None, residence, kept["slack"], pool)
    store: Store = cache.store
    facts = store.model
    if len(stored) != facts.layers:
        raise CacheFileError(
            f"{path} was saved by a model of {len(stored)} layers, this one has {facts.layers}: load it with the model "
            "that saved it"
        )
    store.specs = {(i, name): from_values(one) for i, entry in enumerate(stored) for name, one in entry.items()}
    listed = facts.listed(store.specs)
    _check_dtype(path, facts, saved["model"]["dtype"])
    home = None if pool is None else pool.made(facts, listed, facts.dtype, facts.device)
    if pool is not None:
        facts = store.model = pool.model
    loaded = cache_file.load_cache(path, facts, residence=residence, pool=home)  # type: ignore[arg-type]
    store.adopt(loaded)
    _restore(cache)
    return cache


def _restore(cache: Cache | EncoderDecoderCache) -> None:
    """Has the layers, and the halves of an encoder–decoder cache, know what the store holds."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if isinstance(cache, EncoderDecoderCache):
        sources = {i for i, name in own.store.specs if name == "cross"}
        cache.is_updated = {i: i in sources for i in range(len(own.layers))}
    for view in own.layers:
        view.restore()


def _check_dtype(path: str | os.PathLike[str], facts: ModelFacts, saved: str) -> None:
    own = str(facts.dtype).removeprefix("torch.")
    if own != saved:
        raise CacheFileError(f"{path} was saved by a model in {saved}, this one is in {own}: load the model in {saved}")
