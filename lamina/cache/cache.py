"""The cache: a list of layers and one clock.

    cache = model.new_cache(rows=2)
    model(ids, cache=cache)                  # continues every row
    cache.rewind([0, 3])                     # drops the last three tokens of row 1
    best = cache.select([1, 1])              # a new cache with row 1 twice

In-place verbs return the cache itself. Verbs that return a new cache share no memory that a write to either could
change. Every verb works on every kind of layer, and raises before it changes anything if it cannot be done. A verb that
is interrupted has either not begun, or is finished by the next use of the cache (ops/journal.py).

`lengths`, `rewindable`, `tokens` and `logits` return copies. The cache's own tensors are `clock`, `record` and
`layers`; only this package writes to them.
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

from lamina.cache.clock import Clock, allocate, zeroed_together
from lamina.cache.codec.codec import Codec, Codecs, codecs_of
from lamina.cache.counts import Counts, CountsLike, check_int
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

MOST_KINDS = 8  # different layers that the spec of a new one is compared with

_use_lock = Lock()


class Cache:
    """What a model remembers of each row (sequence). Usually made by `model.new_cache`.

    specs          for each layer of the model, name -> spec
    capacity       the most tokens a row may hold; None: stores grow as needed
    slack          how many committed tokens rings and recurrent layers can be rewound by
    codec          how keys and values are quantized: a name, a Codec, or layer index -> either, with "default" for the
                   other layers
    key_means      mean keys [H, D] by entry, which the codec subtracts (codec/key_mean.py); none for plain keys
    max_positions  the model's own limit on positions (a learned table), if it has one
    residence      where the bytes are stored: "device", or "host", from where a pass fetches layer after layer
                   (storage/prefetch.py). The host must then know every length to know what to fetch: if counts are
                   tensors on the device, opening and committing a pass reads them back. Layer kinds from outside the
                   package are always stored on the device
    pool           the `Pool` whose pages store the tokens; slack, codec and dtype must be those of the pool
    """

    recomputes = False  # True if only ids are stored and every pass recomputes whole rows: see recompute.py

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
        rows, slack = check_int("rows", rows), check_int("slack", slack)
        capacity = None if capacity is None else check_int("capacity", capacity)
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
                f"residence={residence!r} and a pool were given: pages of a pool are on the device; leave one out"
            )
        self.codecs, self.key_means = codecs_of(codec, self.specs), key_means or {}
        room = capacity if pool is None else None  # tokens in pages need no memory of the layer's own
        with zeroed_together():
            self.layers: Sequence[dict[str, Layer]] = self._new_layers(rows, room, slack)
            self._clock = Clock(rows, self.device)
        self.pages = None if pool is None else PageTables.new(pool, rows, capacity)
        if self.pages is not None:
            self.pages.bind(self.layers)
        self._change: Change | None = None  # begun and not finished, after an interrupt: see `settle`
        self.shared = keys_read_by_others(self.specs)
        self._logits: Tensor | None = None  # see `logits`
        self.record = allocate((rows, 0), torch.int64, self.device)  # [B, S] token ids
        self.fetcher = self._new_fetcher()
        self._opened: weakref.ref[OpenPass] | None = None
        self._expected: int | None = None  # final length of the rows, if `reserve` was told
        self._in_use = False  # True while a generation uses this cache
        self._room = 0  # every layer has room for at least this many tokens per row

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self._clock.rows

    @property
    def clock(self) -> Clock:
        """The lengths and rewind marks themselves, after any interrupted change is finished."""
        if self._change is not None:
            self.settle()
        return self._clock

    @property
    def pool(self) -> Pool | None:
        """The pool whose pages store the tokens; None if the cache has memory of its own."""
        return None if self.pages is None else self.pages.pool

    @property
    def steady(self) -> AbstractContextManager[object]:
        """A lock under which a growing pool does not move its pages: held from making room until a launch is queued."""
        return nullcontext() if self.pages is None else self.pages.steady

    @property
    def lengths(self) -> Tensor:
        """[B] number of tokens in each row. A copy."""
        return self.clock.lengths.clone()

    @property
    def logits(self) -> Tensor | None:
        """[B, vocab] logits after each row's last token, NaN if unknown; None before any were stored. A copy."""
        self.settle()
        return None if self._logits is None else self._logits.clone()

    @property
    def tokens(self) -> list[list[int]]:
        """The token ids of each row; -1 for tokens that were fed as embeddings."""
        return [row[:length].tolist() for row, length in zip(self.record, self.clock.sync(), strict=True)]

    @property
    def rewindable(self) -> Tensor:
        """[B] how many tokens each row can be rewound by."""
        limits = [limit for layer in self.every_layer() if (limit := layer.rewindable(self.clock)) is not None]
        return torch.stack([self.clock.lengths, *limits]).amin(dim=0)

    @property
    def limit(self) -> int | None:
        """The most tokens a row may hold; None if there is no limit."""
        limits = [layer.limit for layer in self.every_layer() if not layer.grows]
        return min((limit for limit in (self.capacity, self.max_positions, *limits) if limit is not None), default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers; in a pool, of all pages in the tables, including those shared with other caches."""
        return sum(layer.nbytes for layer in self.every_layer())

    def _new_fetcher(self) -> Prefetcher | None:
        if self.residence == "device":
            return None
        return Prefetcher(self.device) if any(on_host(layer) for layer in self.every_layer()) else None

    # -- changes ---------------------------------------------------------------------------------------------------

    def carry_out(self, change: Change) -> None:
        """Carries out a change. From the first assignment on it is certain: if it is interrupted, the next use of the
        cache finishes it. A change must not read `Cache.clock`, which would try to finish that same change."""
        self._change = change
        self.settle()

    def settle(self) -> None:
        """Finishes an interrupted change. Everything that reads the clock or the logits calls this first."""
        if self._change is not None:
            self._change.finish()
            self._change = None

    def __repr__(self) -> str:
        return "Cache, released" if isinstance(self.layers, Released) else table(self)

    @property
    def reads_source(self) -> bool:
        """True if the model cross-attends to a source (encoder output)."""
        return any(spec.reads_source for entry in self.specs for spec in entry.values())

    def every_layer(self) -> list[Layer]:
        return [layer for entry in self.layers for layer in entry.values()]

    def _new_layers(self, rows: int, capacity: int | None, slack: int) -> list[dict[str, Layer]]:
        """A layer for each entry. Most specs of a model are equal: their layers are twins of the first."""
        firsts: list[tuple[Codec, Layer]] = []
        layers: list[dict[str, Layer]] = [{} for _ in self.specs]
        for i, entry in enumerate(self.specs):
            codec = self.codecs[i]
            for name, spec in entry.items():
                twins = vars(type(spec)).get("twins", False) and (i, name) not in self.key_means
                for of, first in firsts if twins else ():
                    if of is codec and first.spec == spec:
                        layers[i][name] = first.twin()
                        break
                else:
                    layers[i][name] = layer = spec.layer(self._keeping((i, name), rows, capacity, slack))
                    if twins and len(firsts) < MOST_KINDS and layer.can_twin:
                        firsts.append((codec, layer))
        return layers

    def _keeping(self, key: Key, rows: int, capacity: int | None, slack: int) -> Keeping:
        """How one entry is stored: rows, capacity, dtype, codec and so on."""
        mean = self.key_means.get(key)
        if mean is not None:  # [H, D] -> [H, 1, D], which broadcasts over [B, H, S, D]
            mean = mean.to(self.device, torch.promote_types(self.dtype, torch.float32))[:, None]
        codec = self.codecs[key[0]]
        return Keeping(rows, capacity, slack, self.dtype, self.device, codec, mean, self.residence)

    # -- a pass ----------------------------------------------------------------------------------------------------

    def step(
        self,
        T: int,
        counts: CountsLike | None = None,
        rows: Sequence[int] | Tensor | None = None,
        spans: Tensor | None = None,
    ) -> Step:
        """Opens a pass of T tokens per row: checks the arguments and makes room. Nothing is written yet.

        counts  [R] how many of the T tokens of each row are real; the rest is padding on the right
        rows    run these rows only (all when None)
        spans   [R, T] tokens with the same span >= 0 see each other in both directions
        """
        return self._open(open_step(self, T, counts, rows, spans))

    @contextmanager
    def used_alone(self) -> Iterator[None]:
        """Keeps other generations from using this cache, since two would overwrite each other's tokens."""
        with _use_lock:
            if self._in_use:
                raise InputError(
                    "another generation is using this cache (a stream that is not read to its end, or another thread): "
                    "wait until it ends, cancel it, or give each generation its own, with cache.fork()"
                )
            self._in_use = True
        try:
            yield
        finally:
            self._in_use = False

    def _commit(self, step: Step, accepted: CountsLike | None) -> None:
        """The body of `Step.commit`."""
        self.settle()
        if step.closed or step is not self._open_pass:
            raise InputError(
                "this step is closed: it was committed or aborted, or the cache was changed after it was opened"
            )
        commit(self, step, accepted)
        self._release_open_pass()
        step.close()

    @property
    def _open_pass(self) -> OpenPass | None:
        """The pass that is open, if any. A weak reference: a pass keeps its cache alive, not the other way round."""
        return None if self._opened is None else self._opened()

    def _open(self, one: P) -> P:
        """Makes this the open pass; a pass that was open before is aborted."""
        self._abort_open_pass()
        self._opened = weakref.ref(one)
        return one

    def _release_open_pass(self) -> OpenPass | None:
        """Returns the pass that was open; from now on none is."""
        one, self._opened = self._open_pass, None
        return one

    def _abort_open_pass(self) -> None:
        """Aborts the open pass, if any."""
        if (one := self._release_open_pass()) is not None:
            one.abort()

    def _kept_logits(self, vocab: int, dtype: torch.dtype) -> Tensor:
        """[B, vocab] the tensor that stores each row's last logits; allocated on first use."""
        if self._logits is None:
            self._logits = allocate((self.rows, vocab), dtype, self.device, float("nan"))
        return self._logits

    # -- verbs in place --------------------------------------------------------------------------------------------

    def rewind(self, n: CountsLike) -> Cache:
        """Drops the last n tokens of each row (one count, or one per row), as if they had never been fed."""
        rewind(self, n)
        return self

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> Cache:
        """Empties the rows (all when None), and detaches their source."""
        reset(self, rows)
        return self

    def reorder(self, rows: Sequence[int] | Tensor, since: int | Sequence[int] = 0) -> Cache:
        """Row i becomes what row rows[i] was: `select` in place, which copies only where the two rows differ.

        since   how many leading tokens rows i and rows[i] have in common (one value, or one per row); rows that have
                some in common must have the same source
        """
        reorder(self, rows, since)
        return self

    def reserve(self, n: int, most: int | None = None) -> Cache:
        """Makes room for n tokens per row now, so that stores do not grow in a pass before that length. Pages of a pool
        are still allocated as tokens are fed.

        most   the final length of the rows, if known: stores double when they are full, but from now on not beyond it.
               Raises CapacityError if a fixed capacity is smaller. None: as in the previous call
        """
        reserve(self, n, most)
        return self

    def release(self) -> None:
        """Frees all memory now; the cache cannot be used any more. The pages of a cache that is merely dropped are
        freed when it is garbage collected, at no particular time."""
        self._abort_open_pass()
        pages, self._change = self.pages, None
        self.layers, self.pages, self._logits = Released(), None, None  # first, so that no freed page is read
        if pages is not None:
            pages.release()
        self.record = self.record[:, :0].clone()

    def attach(self, source: Source, rows: Sequence[int] | Tensor | None = None) -> Cache:
        """Attaches an encoder output to the rows (all when None): computes and stores the keys and values of every
        cross-attention layer."""
        attach(self, source, rows)
        return self

    def poison(self, value: float = float("nan")) -> Cache:
        """Fills every slot and state that no later pass may depend on, to test that none does."""
        clock = self.clock
        for layer in self.every_layer():
            layer.poison(clock, value)
        if self.fetcher is not None:
            self.fetcher.poison()
        return self

    def save(self, path: str | os.PathLike[str], states: str | None = None) -> Cache:
        """Writes all rows to a file that `lamina.load_cache(path, model)` reads, in this process or another.

        The write is atomic: if it fails, a file that was at `path` before is unchanged. To save some rows, select them
        first.

        states   "bfloat16" or "float16" rounds recurrent states in the file (io/state_dtype.py); None: exact

        >>> cache.select([0]).save("first.cache")                      # doctest: +SKIP
        """
        from lamina.cache.io.cache_file import save  # that module imports this one

        save(self, path, states)
        return self

    # -- verbs that make caches ------------------------------------------------------------------------------------

    def select(self, rows: Sequence[int] | Tensor) -> Cache:
        """A new cache with the given rows, in that order. A row may be named more than once."""
        return select(self, rows)

    def repeat(self, n: int | Sequence[int]) -> Cache:
        """A new cache with each row n times, copies next to each other (n: one value, or one per row)."""
        times = Counts.known(n, self.rows, self.device, "repeat").low
        if sum(times) == 0:
            raise InputError(
                f"repeat needs a count for each of the {self.rows} rows, with a sum of at least 1, not {n}"
            )
        return self.select([row for row, often in enumerate(times) for _ in range(often)])

    def fork(self) -> Cache:
        """An independent copy of the whole cache."""
        return self.select(list(range(self.rows)))

    def split(self) -> list[Cache]:
        """One new cache per row."""
        return [self.select([row]) for row in range(self.rows)]

    @staticmethod
    def join(caches: Sequence[Cache], room: int = 0) -> Cache:
        """A new cache with the rows of several, and room for at least `room` tokens per row. Its capacity and slack are
        the largest of theirs."""
        if not isinstance(caches, Sequence) or not all(isinstance(one, Cache) for one in caches):
            raise InputError(f"join needs a list of caches, not {caches!r}")
        return join(caches, room)


def keys_read_by_others(specs: Sequence[Mapping[str, Any]]) -> frozenset[Key]:
    """The entries whose keys and values other layers read (`Shared` specs)."""
    return frozenset(spec.reads_from for entry in specs for spec in entry.values() if spec.reads_from)
