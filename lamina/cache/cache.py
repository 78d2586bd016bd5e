"""The cache: a list of layers and one clock.

    cache = model.new_cache(rows=2)
    model(ids, cache=cache)                  # continues every row
    cache.rewind([0, 3])                     # takes row 1 back by three tokens
    best = cache.select([1, 1])              # a cache of its own

Verbs in place return the cache itself. Verbs that make a cache share nothing with it that a write could change. Every
verb works on every kind of layer; what cannot be done is refused before anything is changed. A verb that is interrupted
has either not begun or is finished by the next use of the cache (journal.py).

`lengths`, `rewindable`, `tokens` and `logits` are copies: changing them changes nothing here. The cache's own memory is
`clock`, `record` and `layers`, for code that is part of it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lamina.cache.clock import Clock, allocate
from lamina.cache.codec.codec import Codecs, codecs_of
from lamina.cache.counts import Counts, Numbers, whole
from lamina.cache.layers.base import Key, Layer, Released
from lamina.cache.layers.cross import Source
from lamina.cache.ops.attach import attach
from lamina.cache.ops.begin import open_step
from lamina.cache.ops.commit import commit
from lamina.cache.ops.join import join
from lamina.cache.ops.journal import Change
from lamina.cache.ops.reorder import reorder
from lamina.cache.ops.reserve import reserve
from lamina.cache.ops.rewind import reset, rewind
from lamina.cache.ops.select import select
from lamina.cache.passes import OpenPass
from lamina.cache.pool.page_table import PageTables
from lamina.cache.spec import Keeping, LayerSpecs
from lamina.cache.step import Step
from lamina.cache.storage.host import checked_residence
from lamina.cache.storage.prefetch import Prefetcher, on_host
from lamina.cache.summary import table
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.pool.pool import Pool
    from lamina.model import Model

P = TypeVar("P", bound=OpenPass)


_using = Lock()


class Cache:
    """What a model remembers of each row. Usually made by `model.new_cache`.

    specs          for each layer of the model, name -> spec
    capacity       tokens a row may hold; None grows as needed
    slack          how far rings and recurrent layers can be taken back after commit
    codec          how numbers are written: a name, a Codec, or number of a layer -> either, with "default" for the rest
    key_means      mean keys [H, D] by entry, which the codec subtracts (codec/key_mean.py); none for plain keys
    max_positions  the model's own limit on positions (a learned table), if it has one
    residence      where bytes live: "device", or "host". On the host, a pass fetches layer by layer what it needs (see
                   storage/prefetch.py). To know what that is the host must know every length: where counts are tensors
                   on the device, opening and committing a pass reads them. Kinds from outside the package stay on the
                   device
    pool           where its tokens are kept, in pages; slack, codec and dtype must be the pool's
    """

    recomputes = False  # only ids are kept, and every pass is over whole rows: see recompute.py

    def __init__(
        self,
        specs: Sequence[LayerSpecs],
        *,
        rows: int = 1,
        capacity: int | None = None,
        slack: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        codec: Codecs | None = None,
        key_means: Mapping[Key, Tensor] | None = None,
        max_positions: int | None = None,
        model: Model | None = None,
        residence: str = "device",
        pool: Pool | None = None,
    ) -> None:
        rows, slack = whole("rows", rows), whole("slack", slack)
        capacity = None if capacity is None else whole("capacity", capacity)
        if rows < 1:
            raise InputError(f"a cache needs at least one row, not {rows}")
        if capacity is not None and capacity < 1:
            raise InputError(f"capacity must be at least 1, not {capacity}; None lets the cache grow")
        if slack < 0:
            raise InputError(f"slack must be 0 or more, not {slack}")
        self.specs, self.capacity, self.slack = list(specs), capacity, slack
        self.dtype, self.device = dtype, torch.device(device)
        self.max_positions, self.model = max_positions, model
        self.residence = checked_residence(residence)
        if pool is not None and self.residence != "device":
            raise InputError(
                f"residence={residence!r} and a pool were given: pages of a pool lie on the device; leave one out"
            )
        self.codecs, self.key_means = codecs_of(codec, self.specs), key_means or {}
        room = capacity if pool is None else None  # what is to lie in pages has no memory of its own
        self.layers: Sequence[dict[str, Layer]] = [
            {name: spec.layer(self._keeping((i, name), rows, room, slack)) for name, spec in entry.items()}
            for i, entry in enumerate(self.specs)
        ]
        self.pages = None if pool is None else PageTables.new(pool, rows, capacity)
        if self.pages is not None:
            self.pages.bind(self.layers)
        self._clock = Clock(rows, self.device)
        self._change: Change | None = None  # what was begun and interrupted: see `settle`
        self.shared = shared_keys(self.specs)
        self._logits: Tensor | None = None  # see `logits`
        self.record = allocate((rows, 0), torch.int64, self.device)
        self.fetcher = self._new_fetcher()
        self._opened: weakref.ref[OpenPass] | None = None
        self._expected: int | None = None  # tokens of a row in the end, where somebody said so
        self._used = False  # by a generation
        self._room = 0  # tokens that every layer is known to have room for; it may have more

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self._clock.rows

    @property
    def clock(self) -> Clock:
        """The lengths themselves and all that goes with them, after whatever was begun is finished."""
        if self._change is not None:
            self.settle()
        return self._clock

    @property
    def pool(self) -> Pool | None:
        """Where its tokens lie, in pages; None: in memory of its own."""
        return None if self.pages is None else self.pages.pool

    @property
    def steady(self) -> AbstractContextManager[object]:
        """While it is entered, no page of a growing pool moves: held from making room until a launch is queued."""
        return nullcontext() if self.pages is None else self.pages.steady

    @property
    def lengths(self) -> Tensor:
        """[B] how many tokens each row holds. A copy."""
        return self.clock.lengths.clone()

    @property
    def logits(self) -> Tensor | None:
        """[B, vocab] after each row's last token, NaN where they are not known; None before any were kept. A copy."""
        self.settle()
        return None if self._logits is None else self._logits.clone()

    @property
    def tokens(self) -> list[list[int]]:
        """Each row's ids; -1 where embeddings were fed."""
        return [row[:length].tolist() for row, length in zip(self.record, self.clock.sync(), strict=True)]

    @property
    def rewindable(self) -> Tensor:
        """[B] how far each row can be taken back."""
        limits = [limit for layer in self.every_layer() if (limit := layer.rewindable(self.clock)) is not None]
        return torch.stack([self.clock.lengths, *limits]).amin(dim=0)

    @property
    def limit(self) -> int | None:
        """The most tokens a row may hold, None when it can grow without end."""
        limits = [layer.limit for layer in self.every_layer()]
        return min((limit for limit in (self.capacity, self.max_positions, *limits) if limit is not None), default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of everything the layers hold; in a pool, of the pages, whoever holds them too."""
        return sum(layer.nbytes for layer in self.every_layer())

    def _new_fetcher(self) -> Prefetcher | None:
        return Prefetcher(self.device) if any(on_host(layer) for layer in self.every_layer()) else None

    # -- changes ---------------------------------------------------------------------------------------------------

    def carry_out(self, change: Change) -> None:
        """Makes a change. Once it is noted it is certain: should it be interrupted, the next use of the cache goes on
        with it. A change must not ask the cache for its clock, which would mean to finish the change first."""
        self._change = change
        self.settle()

    def settle(self) -> None:
        """Finishes what an interrupt has cut. Everything that looks at the clock or the logits does this first."""
        if self._change is not None:
            self._change.finish()
            self._change = None

    def __repr__(self) -> str:
        return "Cache, released" if isinstance(self.layers, Released) else table(self)

    @property
    def reads_source(self) -> bool:
        """True if the model reads an encoder's output."""
        return any(spec.reads_source for entry in self.specs for spec in entry.values())

    def every_layer(self) -> list[Layer]:
        return [layer for entry in self.layers for layer in entry.values()]

    def _keeping(self, key: Key, rows: int, capacity: int | None, slack: int) -> Keeping:
        """How an entry is kept."""
        mean = self.key_means.get(key)
        if mean is not None:  # over [B, H, S, D]
            mean = mean.to(self.device, torch.promote_types(self.dtype, torch.float32))[:, None]
        codec = self.codecs[key[0]]
        return Keeping(rows, capacity, slack, self.dtype, self.device, codec, mean, self.residence)

    # -- a pass ----------------------------------------------------------------------------------------------------

    def step(
        self,
        T: int,
        counts: Numbers | None = None,
        rows: Sequence[int] | Tensor | None = None,
        spans: Tensor | None = None,
    ) -> Step:
        """Opens a pass of T tokens: checks and makes room. Nothing is written yet.

        counts  how many of the T tokens of each row are real (the rest is padding on the right)
        rows    run only these rows
        spans   [R, T] tokens with the same number >= 0 see each other in both directions
        """
        return self._open(open_step(self, T, counts, rows, spans))

    @contextmanager
    def used_alone(self) -> Iterator[None]:
        """Inside, nobody else may generate with this cache: two generations would write over each other's tokens."""
        with _using:
            if self._used:
                raise InputError(
                    "another generation is using this cache (a stream that is not read to its end, or another thread): "
                    "wait until it ends, cancel it, or give each generation its own, with cache.fork()"
                )
            self._used = True
        try:
            yield
        finally:
            self._used = False

    def _commit(self, step: Step, accepted: Numbers | None) -> None:
        """Stores what a pass read; `step.commit` calls it."""
        self.settle()
        if step.closed or step is not self._open_pass:
            raise InputError(
                "this step is over: it was committed or aborted, or the cache was changed after it was opened"
            )
        commit(self, step, accepted)
        self._release_open_pass()
        step.close()

    @property
    def _open_pass(self) -> OpenPass | None:
        """The pass that is under way, if somebody still has it: a pass refers to its cache, not the other way round."""
        return None if self._opened is None else self._opened()

    def _open(self, one: P) -> P:
        """Makes it the pass that is under way; one that was is aborted."""
        self._abort_open_pass()
        self._opened = weakref.ref(one)
        return one

    def _release_open_pass(self) -> OpenPass | None:
        """The pass that was under way: from now on there is none."""
        one, self._opened = self._open_pass, None
        return one

    def _abort_open_pass(self) -> None:
        """What is not committed by now never will be."""
        if (one := self._release_open_pass()) is not None:
            one.abort()

    def _kept_logits(self, vocab: int, dtype: torch.dtype) -> Tensor:
        """The memory that each row's last logits are kept in; made when they first are."""
        if self._logits is None:
            self._logits = allocate((self.rows, vocab), dtype, self.device, float("nan"))
        return self._logits

    # -- verbs in place --------------------------------------------------------------------------------------------

    def rewind(self, n: Numbers) -> Cache:
        """Takes each row back by its number of tokens, as if they had never been given."""
        rewind(self, n)
        return self

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> Cache:
        """Empties the rows (all when None); an attached source goes too."""
        reset(self, rows)
        return self

    def reorder(self, rows: Sequence[int] | Tensor, since: int | Sequence[int] = 0) -> Cache:
        """Row i becomes what row rows[i] was: `select` in place, and copies only what rows do not have in common.

        since   how many first tokens rows i and rows[i] share, one for all or one for each i; rows that share some
                share their source too
        """
        reorder(self, rows, since)
        return self

    def reserve(self, n: int, most: int | None = None) -> Cache:
        """Makes room for rows of n tokens now, so that no pass up to there has to grow. Pages of a pool are taken as
        tokens come.

        most   tokens that rows are expected to hold in the end: from now on, stores that double when they are full stop
               there. Where a fixed capacity has no room for them, it raises. None: as was said before
        """
        reserve(self, n, most)
        return self

    def release(self) -> None:
        """Gives back all memory at once; the cache cannot be used any more. Pages are given back too when a cache is
        dropped, but when that is, Python says."""
        self._abort_open_pass()
        pages, self._change = self.pages, None
        self.layers, self.pages, self._logits = Released(), None, None  # first: nobody reads pages that are given back
        if pages is not None:
            pages.release()
        self.record = self.record[:, :0].clone()

    def attach(self, source: Source, rows: Sequence[int] | Tensor | None = None) -> Cache:
        """Gives the rows (all when None) their encoder output: computes every cross key and value at once."""
        attach(self, source, rows)
        return self

    def poison(self, value: float = float("nan")) -> Cache:
        """Fills every number that no later pass may depend on: a way to prove that none does."""
        clock = self.clock
        for layer in self.every_layer():
            layer.poison(clock, value)
        if self.fetcher is not None:
            self.fetcher.poison()
        return self

    def save(self, path: str | os.PathLike[str], states: str | None = None) -> Cache:
        """Writes all rows into a file that `lamina.load_cache(path, model)` reads, here or in another process.

        The file is written whole or, whatever happens, not at all: one that was there before is still there then. To
        save some rows, select them first.

        states   "bfloat16" or "float16" rounds recurrent states in the file (see io/state_dtype.py); they are exact
        when None

        >>> cache.select([0]).save("first.cache")                      # doctest: +SKIP
        """
        from lamina.cache.io.cache_file import save  # which imports this module

        save(self, path, states)
        return self

    # -- verbs that make caches ------------------------------------------------------------------------------------

    def select(self, rows: Sequence[int] | Tensor) -> Cache:
        """The given rows, in that order, as a cache of their own. A row may be named more than once."""
        return select(self, rows)

    def repeat(self, n: int | Sequence[int]) -> Cache:
        """Each row n times in a row (or as often as its entry of n says)."""
        times = Counts.known(n, self.rows, self.device, "repeat").low
        if sum(times) == 0:
            raise InputError(f"repeat needs how often for each of the {self.rows} rows, at least 1 in all, not {n}")
        return self.select([row for row, often in enumerate(times) for _ in range(often)])

    def fork(self) -> Cache:
        """A copy that goes its own way."""
        return self.select(list(range(self.rows)))

    def split(self) -> list[Cache]:
        """One cache for each row."""
        return [self.select([row]) for row in range(self.rows)]

    @staticmethod
    def join(caches: Sequence[Cache], room: int = 0) -> Cache:
        """The rows of several caches in one, with room for rows of so many tokens. Takes the largest capacity and slack
        of them."""
        if not isinstance(caches, Sequence) or not all(isinstance(one, Cache) for one in caches):
            raise InputError(f"join needs a list of caches, not {caches!r}")
        return join(caches, room)


def shared_keys(specs: Sequence[Mapping[str, Any]]) -> frozenset[Key]:
    """The entries that other layers read."""
    return frozenset(spec.reads_from for entry in specs for spec in entry.values() if spec.reads_from)
