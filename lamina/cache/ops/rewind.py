"""Rewind and reset: drop the last tokens of rows of a cache, or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from lamina.cache.clock import on_device
from lamina.cache.counts import Counts, CountsLike, row_indices
from lamina.cache.ops.journal import Change
from lamina.errors import RewindError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache


def rewind(cache: Cache, n: CountsLike) -> None:
    """See `Cache.rewind`."""
    clock = cache.clock
    lengths = clock.sync()
    amounts = Counts.known(n, cache.rows, cache.device, "rewind")
    counts = amounts.low
    possible = cache.rewindable.tolist()
    for row, (back, length, most) in enumerate(zip(counts, lengths, possible, strict=True)):
        if back > length:
            raise RewindError(f"row {row} holds {length} tokens and cannot be rewound by {back}")
        if back > most:
            raise RewindError(
                f"row {row} cannot be rewound by {back}: of its {length} tokens, sliding windows and recurrent states "
                f"can be rewound by {most} (the cache's slack is {cache.slack}). Make the cache with "
                f"slack={back} or more, fork it before the tokens to be dropped, or reset the row."
            )
    kept = [length - back for length, back in zip(lengths, counts, strict=True)]
    for layer in cache.every_layer():
        layer.check_rewind(lengths, kept)
    cache._abort_open_pass()
    changed = amounts.tensor > 0
    change = Change()
    change.write(partial(clock.set_lengths, on_device(kept, cache.device), kept))
    for layer in cache.every_layer():
        change.write(partial(layer.rewind, clock, changed))
    if cache.pages is not None:
        change.write(partial(cache.pages.shrink, kept))
    if cache._logits is not None:
        change.write(partial(cache._logits.masked_fill_, changed[:, None], float("nan")))
    cache.carry_out(change)


def reset(cache: Cache, rows: Sequence[int] | Tensor | None) -> None:
    """See `Cache.reset`."""
    clock = cache.clock
    indices = list(range(cache.rows)) if rows is None else row_indices(rows, cache.rows)
    cache._abort_open_pass()
    index = on_device(indices, cache.device)
    change = Change()
    change.write(partial(clock.clear, indices, index))
    for layer in cache.every_layer():
        change.write(partial(layer.reset, index))
    if cache.pages is not None:
        change.write(partial(cache.pages.reset, indices))
    if cache._logits is not None:
        change.write(partial(cache._logits.index_fill_, 0, index, float("nan")))
    cache.carry_out(change)
