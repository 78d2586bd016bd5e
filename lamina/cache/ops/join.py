"""Join: makes one cache of the rows of several. Every layer is fitted to the largest shape among them, then all are
concatenated.

If one of the caches is in a pool, so is the result: pages of that pool are shared, tokens of other caches are copied
into new pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.clock import Clock
from lamina.cache.counts import check_int
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.ops.select import cache_like
from lamina.cache.pool.page_table import PageTables
from lamina.cache.pool.pool import Pool
from lamina.cache.storage.paged import copy_into_pages
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache


def join(caches: Sequence[Cache], room: int = 0, slack: int = 0) -> Cache:
    """See `Cache.join`. slack: at least this much, where theirs is less."""
    if not caches:
        raise InputError("join needs at least one cache")
    if (room := check_int("room", room)) < 0:
        raise InputError(f"room={room}: it must be 0 or more")
    for one in caches:
        one.settle()
    first = caches[0]
    for other in caches[1:]:
        _same_kind(first, other)
    slack = max(slack, *(cache.slack for cache in caches))
    pool = next((cache.pool for cache in caches if cache.pool is not None), None)
    if pool is not None and pool.slack < slack:
        raise InputError(
            f"a cache with a slack of {slack} cannot be joined into a pool with a slack of {pool.slack}: make the pool "
            f"with slack={slack}"
        )
    capacity = None if first.capacity is None else max(cache.capacity or 0 for cache in caches)
    clocks = [_with_slack(cache, slack) for cache in caches]
    rows, longest = sum(cache.rows for cache in caches), max(room, *(max(clock.sync()) for clock in clocks))

    pages = None if pool is None else _pages(pool, caches, clocks, capacity, longest)
    layers: list[dict[str, Layer]] = []
    for i, entry in enumerate(first.layers):
        layers.append({})
        for name, own in entry.items():
            parts = [cache.layers[i][name] for cache in caches]
            if pages is not None and own.pageable:
                same = own.slack == slack  # then the ring size is the same too
                layers[i][name] = own._with({}) if same else own.spec.layer(first._keeping((i, name), 1, None, slack))
                continue
            if isinstance(own, TokenLayer) and own.in_line:
                layers[i][name] = own.join_lines(parts, rows, capacity, longest, slack)
                continue
            like = own.spec.layer(first._keeping((i, name), 1, capacity, slack))
            like.reserve(max(longest, *(part.slots or 0 for part in parts)))
            widest = max(parts, key=lambda part: part.slots or 0)
            if like.slots is not None and (widest.slots or 0) > like.slots:
                like = widest  # a source, for example, whose slots do not depend on the capacity
            fitted = [part.fit(like, clock) for part, clock in zip(parts, clocks, strict=True)]
            layers[i][name] = type(fitted[0]).join(fitted)

    if pages is not None:
        pages.bind(layers)
        _copy_tokens(layers, caches, clocks)
    width = max(cache.record.shape[1] for cache in caches)
    pad = torch.nn.functional.pad
    record = torch.cat([pad(cache.record, (0, width - cache.record.shape[1]), value=-1) for cache in caches])
    logits = None
    known = next((cache._logits for cache in caches if cache._logits is not None), None)
    if known is not None:
        nothing = float("nan")
        logits = torch.cat(
            [known.new_full((c.rows, known.shape[1]), nothing) if c._logits is None else c._logits for c in caches]
        )
    new = cache_like(first, layers, Clock.join(clocks), record, logits, pages)
    new.slack, new.capacity = slack, capacity
    return new


def _pages(
    pool: Pool, caches: Sequence[Cache], clocks: Sequence[Clock], capacity: int | None, longest: int
) -> PageTables:
    """Page tables for the rows of all caches: pages of this pool are shared, tokens of others get new ones."""
    pages = PageTables.new(pool, sum(cache.rows for cache in caches), capacity)
    if capacity is None:
        pages.widen(longest)
    for first, cache, clock in _rows(caches, clocks):
        if cache.pages is not None and cache.pool is pool:
            pages.adopt(first, cache.pages)
        else:
            pages.prepare([(first + row, 0, length) for row, length in enumerate(clock.sync())])
    return pages


def _copy_tokens(layers: Sequence[Mapping[str, Layer]], caches: Sequence[Cache], clocks: Sequence[Clock]) -> None:
    """Copies the tokens of caches that are not in the pool into the pages that were allocated for them."""
    for first, cache, clock in _rows(caches, clocks):
        for entry, old in zip(layers, cache.layers, strict=True):
            for name, layer in entry.items():
                part = old[name]
                if not isinstance(layer, TokenLayer) or not isinstance(part, TokenLayer):
                    continue
                if layer.storage.paged and part.data is not layer.data:
                    copy_into_pages(layer, range(first, first + cache.rows), part, clock)


def _rows(caches: Sequence[Cache], clocks: Sequence[Clock]) -> Iterator[tuple[int, Cache, Clock]]:
    """Yields (index of the cache's first row in the result, cache, clock)."""
    first = 0
    for cache, clock in zip(caches, clocks, strict=True):
        yield first, cache, clock
        first += cache.rows


def _same_kind(a: Cache, b: Cache) -> None:
    if a.model is not b.model or a.specs != b.specs:
        raise InputError("only caches of the same model can be joined")
    if (a.capacity is None) != (b.capacity is None):
        raise InputError(
            f"a growing cache and one of fixed capacity {a.capacity or b.capacity} cannot be joined: "
            "make both with a capacity, or both without"
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise InputError(f"caches in {a.dtype} on {a.device} and in {b.dtype} on {b.device} cannot be joined")
    if a.residence != b.residence:
        raise InputError(
            f"a cache that is stored on the {a.residence} and one that is stored on the {b.residence} cannot be "
            "joined: make both with the same residence"
        )
    for i, (one, other) in enumerate(zip(a.codecs, b.codecs, strict=True)):
        if one != other:
            raise InputError(
                f"caches with codec {one} and {other} in layer {i} cannot be joined: make both with the same codec"
            )
    if a.key_means is not b.key_means and not _same(a.key_means, b.key_means):
        raise InputError("caches whose keys were quantized around different mean keys cannot be joined")


def _same(a: Mapping[Key, Tensor], b: Mapping[Key, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def _with_slack(cache: Cache, slack: int) -> Clock:
    """A copy of the cache's clock for a larger slack. A row whose ring has overwritten tokens cannot be rewound further
    than before, so its `written` mark grows with the slack."""
    clock = cache.clock.select(list(range(cache.rows)), torch.arange(cache.rows, device=cache.device))
    if slack > cache.slack:
        lost = cache.rewindable < clock.lengths
        clock.written.add_(torch.where(lost, slack - cache.slack, 0))
    return clock
