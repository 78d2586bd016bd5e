"""Attach: computes and stores the keys and values of an encoder output for rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from lamina.cache.clock import on_device
from lamina.cache.counts import row_indices
from lamina.cache.layers.cross import CrossLayer, Source
from lamina.cache.ops.journal import Change
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache


def attach(cache: Cache, source: Source, rows: Sequence[int] | Tensor | None) -> None:
    """See `Cache.attach`."""
    if not isinstance(source, Source):
        raise InputError(f"source={source!r}: it must be a Source, which model.encode(ids) makes")
    clock = cache.clock
    targets = list(range(cache.rows)) if rows is None else row_indices(rows, cache.rows)
    if cache.model is None or not cache.reads_source:
        raise InputError("this model reads no source: only encoder–decoder models do")
    if len(source.lengths) not in (1, len(targets)):
        raise InputError(
            f"the source has {len(source.lengths)} rows and is attached to {len(targets)} rows: give one row, or one "
            "for each"
        )
    states, lengths = cache.model.cross_states(source), source.lengths.expand(len(targets))
    cache._abort_open_pass()
    index, change = on_device(targets, cache.device), Change()
    for (i, name), (k, v) in states.items():
        layer = cache.layers[i][name]
        assert isinstance(layer, CrossLayer)
        size = (len(targets), -1, -1, -1)
        change.write(partial(layer.attach, k.expand(size), v.expand(size), lengths, index))
    change.write(partial(clock.note_sources, targets))
    cache.carry_out(change)
