"""Reserve: makes room for more tokens in every layer of a cache, and in the record of ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from lamina.cache.clock import allocate, zeroed_together
from lamina.cache.counts import check_int
from lamina.cache.layers.base import Layer, grown
from lamina.errors import CapacityError, InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache


def reserve(cache: Cache, n: int, most: int | None) -> None:
    """See `Cache.reserve`."""
    if (n := check_int("n", n)) < 0:
        raise InputError(f"cannot reserve {n} tokens: give 0 or more")
    cache.settle()
    wanted = n if most is None else max(n, most)
    if cache.limit is not None and wanted > cache.limit:
        raise CapacityError(f"cannot reserve {wanted} tokens: the capacity is {cache.limit}; make a larger cache")
    if most is not None and cache._expected is not None:
        _expect(cache, None)
    grow(cache, n, n)
    if most is not None:
        _expect(cache, most)
    if cache.fetcher is not None:
        cache.fetcher.reserve(cache.layers, {i for i, _ in cache.shared}, cache.rows)


def grow(cache: Cache, tokens: int, record: int) -> None:
    """Makes room for `tokens` tokens per row in every layer, and for `record` ids per row."""
    groups = together(cache.every_layer())
    with zeroed_together():
        for first, *twins in groups:
            first.reserve_twins(twins, tokens)
    # Stores that grow have room for more than was asked for: passes up to that length need not come here again. Twins
    # have the same room as the first of them.
    slots = [slots for first, *_ in groups if first.grows and (slots := first.slots) is not None]
    limit = cache.limit
    room = min([*slots, *([] if limit is None else [limit])], default=tokens)
    cache._room = max(cache._room, tokens, room)
    have = cache.record.shape[1]
    if record > have:
        new = allocate((cache.rows, grown(have, record, cache._expected)), torch.int64, cache.device, -1)
        if have:
            new[:, :have].copy_(cache.record)
        cache.record = new


def together(layers: Sequence[Layer]) -> Iterable[list[Layer]]:
    """Layers that share the same empty tensors (`Layer.twin`), each with its twins; every other layer on its own."""
    found: dict[int, list[Layer]] = {}
    for layer in layers:
        store = next(iter(layer.data.values()), None)
        shares = store is not None and store.numel() == 0
        found.setdefault(id(store if shares else layer), []).append(layer)
    return found.values()


def _expect(cache: Cache, tokens: int | None) -> None:
    cache._expected = tokens
    for layer in cache.every_layer():
        layer.expected = tokens
