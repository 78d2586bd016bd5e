"""Opening a pass over a cache: what is asked for is checked and room is made, before anything is written.

The host knows an interval that each length lies in. As long as the upper ends fit nothing is read back; where they do
not, lengths are read once, and only then does a store grow or an error say that it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lamina.cache.clock import on_device
from lamina.cache.counts import Counts, Numbers, row_numbers, whole
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
    chosen = None if rows is None else row_numbers(rows, cache.rows)
    numbers = list(range(cache.rows)) if chosen is None else chosen
    if not numbers:
        raise InputError("a pass needs at least one row")
    if len(set(numbers)) != len(numbers):
        raise InputError(f"rows {numbers} name a row twice; repeat the row with cache.select to run it twice")
    if spans is not None and (not isinstance(spans, Tensor) or spans.shape != (len(numbers), T)):
        given = list(spans.shape) if isinstance(spans, Tensor) else repr(spans)
        raise InputError(f"spans must be one number a token, {[len(numbers), T]}, not {given}")
    real = make_room(cache, T, numbers, counts)

    clock, low, high = cache.clock, cache.clock.low, cache.clock.high
    most = [T] * len(numbers) if real is None else real.high
    _check_sources(cache, [row for row, tokens in zip(numbers, most, strict=True) if tokens])
    first = low[numbers[0]]
    one_length = all(low[row] == high[row] == first for row in numbers)
    index = None if chosen is None else on_device(numbers, cache.device)
    before = clock.lengths.clone() if index is None else clock.lengths.index_select(0, index)
    step = Step(
        cache.layers, T, before, None if real is None else real.tensor, cache=cache, rows=chosen,
        start=first if one_length else None,
        bound=max(high[row] + n for row, n in zip(numbers, most, strict=True)),
        given=real, spans=spans,
    )  # fmt: skip
    step.recomputes = cache.recomputes
    step.base = clock.base.clone() if index is None else clock.base.index_select(0, index)
    if cache.fetcher is not None:
        cache.fetcher.reserve(cache.layers, {i for i, _ in cache.shared}, len(numbers))
        lengths = [low[row] for row in numbers]
        step.fetched = StagedPass(cache.fetcher, cache.layers, numbers, chosen is None, lengths, most)
        step.fetched.begin(step)
    if T == 1:  # a ring takes one token in place
        clock.touch(1, index)
    return step


def admit(cache: Cache, one: OpenPass, T: int, counts: Numbers) -> Counts:
    """Opens a pass of T tokens over all rows that runs elsewhere: checks and makes room, as `Cache.step` does."""
    real = make_room(cache, T, list(range(cache.rows)), counts)
    assert real is not None
    cache._open(one)
    return real


def make_room(cache: Cache, T: int, rows: list[int], counts: Numbers | None) -> Counts | None:
    """Room for T more tokens in these rows, or as many of them as counts say; -> the counts, checked."""
    if T < 1:
        raise InputError(f"a pass needs at least one token a row, not {T}")
    clock = cache.clock
    real = None if counts is None else Counts.of(counts, len(rows), T, cache.device, "counts")
    if real is not None and real.out_of_range is not None:
        clock.doubt(real.out_of_range)
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
        raise _full(cache, row, clock.high[row], max(need) - clock.high[row], limit)
    # A pass of padding alone still needs a slot to point at.
    grow(cache, max(1, *need), max(clock.high[row] for row in rows) + T)


def _full(cache: Cache, row: int, length: int, more: int, limit: int) -> CapacityError:
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
