"""Trimming: one row of a cache as a cache of its own, without a slot that it does not use, for keeping.

A row in pages shares them, and nothing is copied but states.
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
from lamina.cache.ops.select import made
from lamina.cache.pool.pool import LayerGroup

ALIGNED = 16  # numbers: every store begins at a multiple of 16 bytes, as kernels take for granted


def trimmed(
    cache: Cache, row: int, length: int | None = None, states: torch.dtype | None = None, lent: bool = False
) -> Cache:
    """The row's first `length` tokens (all when None), copied or in shared pages; the cache stays as it is.

    states   the dtype of recurrent states in the copy; None: as they are
    lent     lines are not copied either: what comes out is for reading, as long as nobody changes the cache

    The row must be able to go back that far: see `Cache.rewindable`. To go on from the copy, join it with others or
    with none, which makes room again.
    """
    index = on_device([row], cache.device)
    clock = cache.clock.select([row], index)
    held, written = _marks(cache, clock)
    back = 0 if length is None else held - length
    if back:
        clock.take_back(on_device([back], cache.device), [back])
    pages = None if cache.pages is None else cache.pages.select([row])
    if pages is not None:
        pages.shrink([held - back])

    def own(layer: Layer) -> Layer:
        if isinstance(layer, TokenLayer) and layer.in_line:
            return layer.line(row, held - back)
        return layer.used(held - back, written).select(index)

    layers = [{name: own(layer) for name, layer in entry.items()} for entry in cache.layers]
    if not lent:
        _copy_lines(layers)
    logits = None if back or cache._logits is None else cache._logits.index_select(0, index)
    new = made(cache, layers, clock, cache.record[row : row + 1, : held - back], logits, pages)
    if back:
        changed = clock.lengths < held
        for layer in new.every_layer():
            layer.rewind(clock, changed)
    if states is not None:
        new.layers = [{name: round_states(layer, states) for name, layer in entry.items()} for entry in new.layers]
    return new


def _copy_lines(layers: Sequence[Mapping[str, Layer]]) -> None:
    """Gives layers in line memory of their own, all stores of a dtype at once: asking for it store by store takes
    longer than copying."""
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
    """What a trimmed row takes: bytes of its own (layers, ids and logits), and pages, which others may hold too."""

    own: int
    pages: Mapping[LayerGroup, set[int]]

    @property
    def nbytes(self) -> int:
        return total([self])


def trimmed_size(cache: Cache, row: int, states: torch.dtype | None = None) -> Size:
    """What `trimmed(cache, row, states=states)` takes."""
    held, written = _marks(cache, cache.clock, row)
    own = held * cache.record.itemsize + (0 if cache._logits is None else cache._logits[row].nbytes)
    for layer in cache.every_layer():
        if not layer.storage.paged:
            own += rounded_bytes(layer.used(held, written), states) // cache.rows
    return Size(own, {} if cache.pages is None else cache.pages.pages(row, held))


def _marks(cache: Cache, clock: Clock, row: int = 0) -> tuple[int, int]:
    """Length and `written` of a row of the clock. Only rings ask for the second, which the device alone knows."""
    rings = any(layer.layout is not None and layer.layout.most is not None for layer in cache.every_layer())
    if not rings and not clock.doubted and clock.exact:
        return clock.low[row], clock.low[row]
    held, written, _ = clock.read_marks()[row]
    return held, written


def total(sizes: Iterable[Size]) -> int:
    """Bytes of several rows together: a page that some of them share counts once."""
    own, pages = 0, defaultdict[LayerGroup, set[int]](set)
    for one in sizes:
        own += one.own
        for kind, numbers in one.pages.items():
            pages[kind] |= numbers
    return own + sum(len(numbers) * kind.page_bytes for kind, numbers in pages.items())
