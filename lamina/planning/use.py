"""How a cache will be used, and what that takes: the cache itself, laid out on the meta device, and passes rehearsed.

Nothing here knows how large a kind of layer is. A cache on the meta device is the same object with tensors that have no
memory, so its table is that of the real one, whatever is kept in it and however.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codecs
from lamina.cache.layers.cross import CrossLayer
from lamina.cache.ops.reserve import grow
from lamina.cache.pool.pool import Pool
from lamina.cache.summary import Line, lines
from lamina.errors import CapacityError, InputError
from lamina.generation.room import initial_room
from lamina.model import Model
from lamina.planning.context import set_clock
from lamina.rehearsal.meter import AllocationMeter
from lamina.rehearsal.rehearsal import Rehearsal


@dataclass(frozen=True)
class Use:
    """`rows` rows of `length` tokens.

    capacity       of a cache with fixed room; None grows
    reserve        room for the prompt and 512 new tokens is made at first, and more as they come but never beyond
                   `length`: as `generate` does with max_new_tokens = length - prompt. False: as tokens come
    slack          of the cache
    prompt         tokens that are read before one is made; None: all
    prefill_chunk  the most prompt tokens of a row in one pass; None: all
    source         tokens of each row's source, for models that read one
    codec          how keys and values are written, as in `model.new_cache`
    residence      where bytes live, as in `model.new_cache`
    page           tokens of a page, for a cache in a pool that is just large enough for it; None: no pool
    """

    rows: int = 1
    length: int = 1
    capacity: int | None = None
    reserve: bool = True
    slack: int = 0
    prompt: int | None = None
    prefill_chunk: int | None = None
    source: int | None = None
    codec: Codecs | None = None
    residence: str = "device"
    page: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "length", "capacity", "prompt", "prefill_chunk", "source", "page"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise InputError(f"{name}={given}: it must be at least 1")
        if self.capacity is not None and self.length > self.capacity:
            raise CapacityError(
                f"{self.length} tokens do not fit a capacity of {self.capacity}: give a larger one or none, which grows"
            )
        if self.prompt is not None and self.prompt > self.length:
            raise InputError(f"a prompt of {self.prompt} tokens is longer than the whole row, length={self.length}")

    def check(self, model: Model) -> None:
        reads = any(spec.reads_source for entry in model.specs for spec in entry.values())
        if reads and self.source is None:
            raise InputError("this model reads a source: say how many tokens it has with source=…")
        if not reads and self.source is not None:
            raise InputError(f"source={self.source} was given, but this model reads none: leave it out")
        if model.max_positions is not None and self.length > model.max_positions:
            raise CapacityError(
                f"{self.length} tokens were asked for, but the model has positions for {model.max_positions}: "
                f"give length={model.max_positions} or less"
            )

    @property
    def read(self) -> int:
        """Tokens of the prompt."""
        return self.length if self.prompt is None else self.prompt

    @property
    def chunk(self) -> int:
        """Tokens of the prompt in one pass."""
        return min(self.prefill_chunk or self.read, self.read)

    def passes(self) -> list[tuple[int, int]]:
        """The passes that may hold the most, as (tokens held before, new tokens): the last ones of each size."""
        chunk = self.chunk
        whole, rest = divmod(self.read, chunk)
        found = [((whole - 1) * chunk, chunk), (whole * chunk, rest), (self.length - 1, self.length > self.read)]
        return [(start, int(tokens)) for start, tokens in found if tokens]


def lay_out(model: Model, use: Use) -> tuple[Cache, int]:
    """The cache that holds it all, on the meta device; and the bytes held besides, on the device, while it grew."""
    if use.codec is not None:
        model.new_cache(codec=use.codec)  # what belongs to the model (mean keys) is computed once
    pool = None if use.page is None else _pool(model, use, use.page)
    with AllocationMeter() as held:
        cache = model.new_cache(use.rows, use.capacity, use.slack, codec=use.codec, residence=use.residence, pool=pool)
        if use.source is not None:
            _attach(cache, use.source)
        if use.reserve:
            cache.reserve(initial_room(use.read, use.length - use.read), most=use.length)
        _grow(cache, use)
        cache._kept_logits(model.vocab, model.dtype)
        if cache.pages is not None:
            cache.pages.prepare([(row, 0, use.length) for row in range(use.rows)])
    return cache, held.most - held.now


def lines_of(cache: Cache) -> list[Line]:
    """Every tensor of a cache, and what its pool has besides."""
    if cache.pages is None or cache.pool is None:
        return lines(cache)
    more = cache.pool.nbytes - sum(cache.pages.own_and_shared)
    return [*lines(cache), Line("pages that are nobody's", None, None, "", more)]


def _pool(model: Model, use: Use, page: int) -> Pool:
    return Pool(model, use.rows * -(-use.length // page) * page, use.rows, page, use.slack, use.codec)


def _grow(cache: Cache, use: Use) -> None:
    """Makes room as passes do: for the prompt piece by piece, then for one token after the other."""

    def room(tokens: int) -> None:
        grow(cache, tokens, tokens)
        if cache.fetcher is not None:
            cache.fetcher.reserve(cache.layers, {i for i, _ in cache.shared}, cache.rows)

    for end in range(use.chunk, use.read + use.chunk, use.chunk) if not use.reserve else (use.read,):
        room(min(end, use.read))
    while True:
        rooms = [layer.slots or 0 for layer in cache.every_layer() if layer.grows]
        full = min([*rooms, cache.record.shape[1]])  # the token after this many makes something grow
        if full >= use.length:
            return
        room(full + 1)


def _attach(cache: Cache, source: int) -> None:
    rows = torch.empty(cache.rows, dtype=torch.int64, device="meta")
    for entry in cache.layers:
        for layer in entry.values():
            if isinstance(layer, CrossLayer):
                spec, shape = layer.spec, (cache.rows, layer.spec.kv_heads, source)
                k, v = (torch.empty(*shape, dim, device="meta") for dim in (spec.key_dim, spec.value_dim))
                layer.attach(k, v, rows, rows)


def scratch_of(model: Model, rehearsal: Rehearsal, use: Use, cache: Cache) -> int:
    """The most bytes that a pass holds besides weights and this cache, which is laid out for the use."""
    runs: list[Callable[[], object]] = [partial(_pass, model, cache, *one) for one in use.passes()]
    if use.source is not None:
        runs.append(lambda: cache.attach(model.random_source(use.rows, use.source or 0)))
    return max(rehearsal.most(run) for run in runs)


def _pass(model: Model, cache: Cache, start: int, tokens: int) -> None:
    set_clock(cache, start)
    cache.clock.sourced = [True] * cache.rows
    model(_ids(cache.rows, tokens), cache=cache, logits="last")


def _ids(rows: int, tokens: int) -> Tensor:
    return torch.empty(rows, tokens, dtype=torch.int64, device="meta")
