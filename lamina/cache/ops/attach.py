"""Attach: computes and stores the keys and values of an encoder output for rows of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from lamina.cache.clock import on_device
from lamina.cache.counts import row_indices
from lamina.cache.layers.base import Key
from lamina.cache.layers.cross import CrossLayer, Source
from lamina.cache.ops.journal import Change
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache

CrossInputs = Mapping[Key, Mapping[str, Tensor]]
"""(layer, entry) -> the source's "k" and "v" [B, H, S, D], which that layer cross-attends to, and "lengths" [B]."""


def attach(cache: Cache, source: Source, rows: Sequence[int] | Tensor | None) -> None:
    """See `Cache.attach`."""
    if not isinstance(source, Source):
        raise InputError(f"source={source!r}: it must be a Source, which model.encode(ids) makes")
    targets = list(range(cache.rows)) if rows is None else row_indices(rows, cache.rows)
    if cache.model is None or not cache.reads_source:
        raise InputError("this model reads no source: only encoder–decoder models do")
    if len(source.lengths) not in (1, len(targets)):
        raise InputError(
            f"the source has {len(source.lengths)} rows and is attached to {len(targets)} rows: give one row, or one "
            "for each"
        )
    size = (len(targets), -1, -1, -1)
    states = {key: (k.expand(size), v.expand(size)) for key, (k, v) in cache.model.cross_states(source).items()}
    _store(cache, targets, states, source.lengths.expand(len(targets)))


def attach_like(cache: Cache, other: Cache) -> None:
    """Attaches the sources of another cache, whose first layers are those of this one and which has as many rows."""
    held = {key: inputs for key, inputs in cross_inputs_of(other).items() if key[0] < len(cache.layers)}
    targets = [row for row, sourced in enumerate(other.clock.sourced) if sourced]
    if held and targets:
        index = on_device(targets, cache.device)
        states = {key: (inputs["k"][index], inputs["v"][index]) for key, inputs in held.items()}
        _store(cache, targets, states, next(iter(held.values()))["lengths"][index])


def _store(cache: Cache, rows: list[int], states: Mapping[Key, tuple[Tensor, Tensor]], lengths: Tensor) -> None:
    """Stores keys and values [R, H, S, D] of sources with `lengths` [R] for these rows."""
    clock = cache.clock
    cache._abort_open_pass()
    index, change = on_device(rows, cache.device), Change()
    for (i, name), (k, v) in states.items():
        layer = cache.layers[i][name]
        assert isinstance(layer, CrossLayer)
        change.write(partial(layer.attach, k, v, lengths, index))
    change.write(partial(clock.note_sources, rows))
    cache.carry_out(change)


def cross_inputs_of(cache: Cache) -> CrossInputs:
    """The keys and values, dequantized, and the lengths of the sources that a cache stores."""
    return {
        (i, name): layer.source_inputs()
        for i, entry in enumerate(cache.layers)
        for name, layer in entry.items()
        if isinstance(layer, CrossLayer)
    }
