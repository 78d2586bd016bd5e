"""Begin: opens a pass over a cache. Arguments are checked and room is made before anything is written.

The host has a lower and an upper bound on each length. As long as the upper bounds fit, nothing is read back from the
device. Otherwise the lengths are read once, and only if those do not fit either does a store grow, or an error is
raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lamina.cache.clock import on_device
from lamina.cache.counts import Counts, Numbers, row_indices, whole
from lamina.cache.ops.reserve import grow
from lamina.cache.passes import OpenPass
from lamina.cache.step import Step
from lamina.cache.storage.prefetch import StagedPass
from lamina.errors import CapacityError, InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache


def open_step(
    cache: Cache, T: int, counts: Numbers | None, rows: Sequence[int] | Tensor | None, spans: Tensor | None
) -> Step:
    """See `Cache.step`."""
    T = whole("T", T)
    chosen = None if rows is None else row_indices(rows, cache.rows)
    indices = list(range(cache.rows)) if chosen is None else chosen
    if not indices:
        raise InputError("a pass needs at least one row")
    if len(set(indices)) != len(indices):
        raise InputError(f"rows {indices} name a row twice; repeat the row with cache.select to run it twice")
    if spans is not None and (not isinstance(spans, Tensor) or spans.shape != (len(indices), T)):
        given = list(spans.shape) if isinstance(spans, Tensor) else repr(spans)
        raise InputError(f"spans must be one number per token, {[len(indices), T]}, not {given}")
    real = make_room(cache, T, indices, counts)

    clock, low, high = cache.clock, cache.clock.low, cache.clock.high
    most = [T] * len(indices) if real is None else real.high
    _check_sources(cache, [row for row, tokens in zip(indices, most, strict=True) if tokens])
    first = low[indices[0]]
    one_length = all(low[row] == high[row] == first for row in indices)
    index = None if chosen is None else on_device(indices, cache.device)
    before = clock.lengths.clone() if index is None else clock.lengths.index_select(0, index)
    step = Step(
        cache.layers, T, before, None if real is None else real.tensor, cache=cache, rows=chosen,
        start=first if one_length else None,
        bound=max(high[row] + n for row, n in zip(indices, most, strict=True)),
        given=real, spans=spans,
    )  # fmt: skip
    step.recomputes = cache.recomputes
    step.base = clock.base.clone() if index is None else clock.base.index_select(0, index)
    if cache.fetcher is not None:
        cache.fetcher.reserve(cache.layers, {i for i, _ in cache.shared}, len(indices))
        lengths = [low[row] for row in indices]
        step.fetched = StagedPass(cache.fetcher, cache.layers, indices, chosen is None, lengths, most)
        step.fetched.begin(step)
    if T == 1:  # a ring is written in place by a pass of one token
        clock.mark_written(1, index)
    return step


def open_captured(cache: Cache, one: OpenPass, T: int, counts: Numbers) -> Counts:
    """Opens a captured pass of T tokens over all rows: checks and makes room, as `Cache.step` does for a `Step`."""
    real = make_room(cache, T, list(range(cache.rows)), counts)
    assert real is not None
    cache._open(one)
    return real


def make_room(cache: Cache, T: int, rows: list[int], counts: Numbers | None) -> Counts | None:
    """Makes room for T more tokens in each of these rows, or for `counts` of them. -> the checked counts"""
    if T < 1:
        raise InputError(f"a pass needs at least one token per row, not {T}")
    clock = cache.clock
    real = None if counts is None else Counts.of(counts, len(rows), T, cache.device, "counts")
    if real is not None and real.out_of_range is not None:
        clock.note_out_of_range(real.out_of_range)
    if cache.fetcher is not None:
        if not clock.exact:
            clock.sync()
        if real is not None:
            real.read()
    if max(clock.high[row] for row in rows) + T > min(cache._room, cache.record.shape[1]):
        _grow(cache, rows, real, T)
    if cache.pages is not None:
        cache.pages.prepare_pass(clock, rows, real, T)
    return real


def _grow(cache: Cache, rows: list[int], counts: Counts | None, T: int) -> None:
    clock, limit = cache.clock, cache.limit
    room = min((layer.slots or 0 for layer in cache.every_layer() if layer.grows), default=None)

    def needed() -> list[int]:
        most = [T] * len(rows) if counts is None else counts.high
        return [clock.high[row] + n for row, n in zip(rows, most, strict=True)]

    bounds = [bound for bound in (limit, room) if bound is not None]
    if bounds and max(needed()) > min(bounds):
        clock.sync()
        if counts is not None:
            counts.read()
    need = needed()
    if limit is not None and max(need) > limit:
        row = rows[need.index(max(need))]
        raise _capacity_error(cache, row, clock.high[row], max(need) - clock.high[row], limit)
    # A pass of padding only still writes to some slot: see layers/tokens.py.
    grow(cache, max(1, *need), max(clock.high[row] for row in rows) + T)


def _capacity_error(cache: Cache, row: int, length: int, more: int, limit: int) -> CapacityError:
    if limit == cache.max_positions:
        return CapacityError(
            f"row {row} holds {length} tokens and {more} more were given, but the model has positions for {limit}. "
            "Use a shorter prompt, or take the row back with cache.rewind or cache.reset."
        )
    return CapacityError(
        f"row {row} holds {length} tokens and {more} more were given, but the capacity is {limit}. Make the cache "
        "with a larger capacity (or None, which grows), or take the row back with cache.rewind or cache.reset."
    )


def _check_sources(cache: Cache, rows: list[int]) -> None:
    if cache.model is None or not cache.reads_source:
        return
    for row in rows:
        if not cache.clock.sourced[row]:
            raise InputError(
                f"this model reads a source, and row {row} has none: make one with model.encode(ids) and give it "
                f"to model.new_cache(rows, source=source) or cache.attach(source, rows=[{row}])"
            )
