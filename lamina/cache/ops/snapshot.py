"""Snapshot: one row of a cache as a new cache without unused slots, which prefix stores keep.

If the cache is in a pool, the snapshot shares the row's pages, and only states, ids and logits are copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lamina.cache.cache import Cache
from lamina.cache.clock import Clock, allocate, on_device
from lamina.cache.io.state_dtype import round_states, rounded_bytes
from lamina.cache.layers.base import Layer
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.ops.select import cache_like
from lamina.cache.pool.pool import LayerGroup

ALIGNED = 16  # elements: every store begins at a multiple of 16 bytes, which kernels assume


def take_snapshot(
    cache: Cache, row: int, length: int | None = None, states: torch.dtype | None = None, borrow: bool = False
) -> Cache:
    """Copies the row's first `length` tokens (all when None), or shares their pages; the cache is not changed.

    states   the dtype of recurrent states in the snapshot; None: as in the cache
    borrow   True: lines are views of the cache's memory, valid for reading until the cache changes

    It must be possible to rewind the row to `length`: see `Cache.rewindable`. A snapshot has no room for more tokens;
    `Cache.join([snapshot, …])` makes a cache that can be continued.
    """
    index = on_device([row], cache.device)
    clock = cache.clock.select([row], index)
    held, written = _marks(cache, clock)
    kept = held if length is None else length
    if kept < held:
        clock.set_lengths(on_device([kept], cache.device), [kept])
    pages = None if cache.pages is None else cache.pages.select([row])
    if pages is not None:
        pages.shrink([kept])

    def own(layer: Layer) -> Layer:
        if isinstance(layer, TokenLayer) and layer.in_line:
            return layer.row_line(row, kept)
        return layer.used(kept, written).select(index)

    layers = [{name: own(layer) for name, layer in entry.items()} for entry in cache.layers]
    if not borrow:
        _copy_lines(layers)
    logits = None if kept < held or cache._logits is None else cache._logits.index_select(0, index)
    new = cache_like(cache, layers, clock, cache.record[row : row + 1, :kept], logits, pages)
    if kept < held:
        changed = clock.lengths < held
        for layer in new.every_layer():
            layer.rewind(clock, changed)
    if states is not None:
        new.layers = [{name: round_states(layer, states) for name, layer in entry.items()} for entry in new.layers]
    return new


def _copy_lines(layers: Sequence[Mapping[str, Layer]]) -> None:
    """Copies the stores of `in_line` layers into new memory, one allocation per dtype: one per store would take longer
    than the copies themselves."""
    lines = [layer for entry in layers for layer in entry.values() if isinstance(layer, TokenLayer) and layer.in_line]
    kinds = defaultdict[torch.dtype, list[tuple[TokenLayer, str]]](list)
    for layer in lines:
        for name, store in layer.data.items():
            kinds[store.dtype].append((layer, name))
    for dtype, places in kinds.items():
        stores = [layer.data[name] for layer, name in places]
        sizes = [-(-store.numel() // ALIGNED) * ALIGNED for store in stores]
        memory = allocate((sum(sizes),), dtype, stores[0].device, fill=None)
        for (layer, name), store, own in zip(places, stores, memory.split(sizes), strict=True):
            layer.data[name] = own[: store.numel()].view(store.shape).copy_(store)


@dataclass(frozen=True)
class Size:
    """Memory of a snapshot: its own bytes (layers, ids and logits), and its pages, which others may share."""

    own: int
    pages: Mapping[LayerGroup, set[int]]

    @property
    def nbytes(self) -> int:
        return total([self])


def snapshot_size(cache: Cache, row: int, states: torch.dtype | None = None) -> Size:
    """The memory that `take_snapshot(cache, row, states=states)` needs."""
    held, written = _marks(cache, cache.clock, row)
    own = held * cache.record.itemsize + (0 if cache._logits is None else cache._logits[row].nbytes)
    for layer in cache.every_layer():
        if not layer.storage.paged:
            own += rounded_bytes(layer.used(held, written), states) // cache.rows
    return Size(own, {} if cache.pages is None else cache.pages.pages(row, held))


def _marks(cache: Cache, clock: Clock, row: int = 0) -> tuple[int, int]:
    """Length and `written` of a row. `written` is read from the device only if there are rings, which need it."""
    rings = any(layer.layout is not None and layer.layout.most is not None for layer in cache.every_layer())
    if not rings and not clock.unchecked and clock.exact:
        return clock.low[row], clock.low[row]
    held, written, _ = clock.read_marks()[row]
    return held, written


def total(sizes: Iterable[Size]) -> int:
    """Bytes of several snapshots together; a page that some of them share counts once."""
    own, pages = 0, defaultdict[LayerGroup, set[int]](set)
    for one in sizes:
        own += one.own
        for kind, numbers in one.pages.items():
            pages[kind] |= numbers
    return own + sum(len(numbers) * kind.page_bytes for kind, numbers in pages.items())
