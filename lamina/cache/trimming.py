"""Trimming: one row of a cache as a cache of its own, without a slot that it does not use, for keeping."""

from __future__ import annotations

import torch

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.cache.idle import idle, idle_bytes


def trimmed(cache: Cache, row: int, length: int | None = None, states: torch.dtype | None = None) -> Cache:
    """The row's first `length` tokens (all when None), copied; the cache stays as it is.

    states   the dtype of recurrent states in the copy; None: as they are

    The row must be able to go back that far: see `Cache.rewindable`. To go on from the copy, join it with others or
    with none, which makes room again.
    """
    index = on_device([row], cache.device)
    clock = cache.clock.select([row], index)
    held, written, _ = clock.read_marks()[0]
    back = 0 if length is None else held - length
    if back:
        clock.take_back(on_device([back], cache.device), [back])
    layers = [
        {name: layer.used(held - back, written).select(index) for name, layer in entry.items()}
        for entry in cache.layers
    ]
    logits = None if back or cache.logits is None else cache.logits.index_select(0, index)
    new = cache._made(layers, clock, cache.record[row : row + 1, : held - back], logits)
    if back:
        for layer in new._all():
            layer.rewind(clock, clock.lengths < held)
    if states is not None:
        new.layers = [{name: idle(layer, states) for name, layer in entry.items()} for entry in new.layers]
    return new


def trimmed_bytes(cache: Cache, row: int, states: torch.dtype | None = None) -> int:
    """How many bytes `trimmed(cache, row, states=states)` takes: layers, ids and logits."""
    held, written, _ = cache.clock.select([row], on_device([row], cache.device)).read_marks()[0]
    layers = sum(idle_bytes(layer.used(held, written), states) // cache.rows for layer in cache._all())
    logits = 0 if cache.logits is None else cache.logits[row].nbytes
    return layers + held * cache.record.itemsize + logits
