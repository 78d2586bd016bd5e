"""Select: makes a new cache of some rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.clock import Clock, allocate, on_device
from lamina.cache.counts import row_indices
from lamina.cache.layers.base import Layer
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache
    from lamina.cache.pool.page_table import PageTables


def select(cache: Cache, rows: Sequence[int] | Tensor) -> Cache:
    """See `Cache.select`."""
    clock = cache.clock
    indices = row_indices(rows, cache.rows)
    if not indices:
        raise InputError("select needs at least one row")
    index = on_device(indices, cache.device)
    layers = [{name: layer.select(index) for name, layer in entry.items()} for entry in cache.layers]
    return cache_like(
        cache,
        layers,
        clock.select(indices, index),
        cache.record.index_select(0, index),
        None if cache._logits is None else cache._logits.index_select(0, index),
        None if cache.pages is None else cache.pages.select(indices),
    )


def cache_like(
    cache: Cache,
    layers: list[dict[str, Layer]],
    clock: Clock,
    record: Tensor,
    logits: Tensor | None,
    pages: PageTables | None,
) -> Cache:
    """A new cache with the settings of this one and the given layers, clock, ids and logits."""
    new = object.__new__(type(cache))
    new.__dict__.update(cache.__dict__)
    new.layers, new._clock, new._opened, new._room, new.pages = layers, clock, None, 0, pages
    if pages is not None:
        pages.bind(layers)
    new.fetcher = new._new_fetcher()
    new.record = allocate(record.shape, torch.int64, cache.device)
    new.record.copy_(record)
    new._change, new._logits, new._in_use = None, None, False
    if logits is not None:
        new._logits = allocate(logits.shape, logits.dtype, cache.device)
        new._logits.copy_(logits)
    return new
