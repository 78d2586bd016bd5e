"""The cache: a list of layers and one clock.

    cache = model.new_cache(rows=2)
    model(ids, cache=cache)                  # continues every row
    cache.rewind([0, 3])                     # takes row 1 back by three tokens
    best = cache.select([1, 1])              # a cache of its own

Verbs in place return the cache itself. Verbs that make a cache share nothing with it that a write could change. Every
verb works on every kind of layer; what cannot be done is refused before anything is changed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.clock import Clock, allocate, on_device
from lamina.cache.codec import Codecs, codecs_of
from lamina.cache.counts import Counts, row_numbers
from lamina.cache.cross import CrossLayer, Source
from lamina.cache.fetching import Fetched, Fetcher, is_far
from lamina.cache.holding import Tables
from lamina.cache.host import checked_residence
from lamina.cache.layer import Key, Layer, Released
from lamina.cache.spec import Keeping, LayerSpecs, Shared
from lamina.cache.step import Step
from lamina.cache.table import table
from lamina.errors import CapacityError, InputError, RewindError

if TYPE_CHECKING:
    from lamina.cache.pool import Pool
    from lamina.model import Model
    from lamina.runtime.passes import CapturedPass

Numbers = int | Sequence[int] | Tensor


class Cache:
    """What a model remembers of each row. Usually made by `model.new_cache`.

    specs          for each layer of the model, name -> spec
    capacity       tokens a row may hold; None grows as needed
    slack          how far rings and recurrent layers can be taken back after commit
    codec          how numbers are written: a name, a Codec, or number of a layer -> either, with "default" for the rest
    centres        what the codec takes from keys, by entry (see centre.py); nothing where there is none
    max_positions  the model's own limit on positions (a learned table), if it has one
    residence      where bytes live: "device", or "host". On the host, a pass fetches layer by layer what it needs (see
                   fetching.py). To know what that is the host must know every length: where counts are tensors on the
                   device, opening and committing a pass reads them. Kinds from outside the package stay on the device
    pool           where its tokens are kept, in pages; slack, codec and dtype must be the pool's
    """

    forgets = False  # only ids are kept, and every pass is over whole rows: see forgetting.py

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
        centres: Mapping[Key, Tensor] | None = None,
        max_positions: int | None = None,
        model: Model | None = None,
        residence: str = "device",
        pool: Pool | None = None,
    ) -> None:
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
        self.codecs, self.centres = codecs_of(codec, self.specs), centres or {}
        room = capacity if pool is None else None  # what is to lie in pages has no memory of its own
        self.layers: Sequence[dict[str, Layer]] = [
            {name: spec.layer(self.keeping((i, name), rows, room, slack)) for name, spec in entry.items()}
            for i, entry in enumerate(self.specs)
        ]
        self.pages = None if pool is None else Tables.new(pool, rows, capacity)
        if self.pages is not None:
            self.pages.bind(self.layers)
        self.clock = Clock(rows, self.device)
        self.shared = shared_keys(self.specs)
        self.logits: Tensor | None = None  # [B, vocab] after each row's last token, NaN where not known
        self.record = allocate((rows, 0), torch.int64, self.device)
        self.fetcher = self._new_fetcher()
        self._opened: weakref.ref[Step | CapturedPass] | None = None
        self._room = 0  # tokens that every layer is known to have room for; it may have more

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self.clock.rows

    @property
    def pool(self) -> Pool | None:
        """Where its tokens lie, in pages; None: in memory of its own."""
        return None if self.pages is None else self.pages.pool

    @property
    def lengths(self) -> Tensor:
        """[B] how many tokens each row holds."""
        return self.clock.lengths

    @property
    def tokens(self) -> list[list[int]]:
        """Each row's ids; -1 where embeddings were fed."""
        return [row[:length].tolist() for row, length in zip(self.record, self.clock.sync(), strict=True)]

    @property
    def rewindable(self) -> Tensor:
        """[B] how far each row can be taken back."""
        limits = [limit for layer in self._all() if (limit := layer.rewindable(self.clock)) is not None]
        return torch.stack([self.lengths, *limits]).amin(dim=0)

    @property
    def limit(self) -> int | None:
        """The most tokens a row may hold, None when it can grow without end."""
        limits = [layer.limit for layer in self._all() if layer.limit is not None]
        if self.max_positions is not None:
            limits.append(self.max_positions)
        return min(limits, default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of everything the layers hold; in a pool, of the pages, whoever holds them too."""
        return sum(layer.nbytes for layer in self._all())

    def _new_fetcher(self) -> Fetcher | None:
        return Fetcher(self.device) if any(is_far(layer) for layer in self._all()) else None

    def __repr__(self) -> str:
        return "Cache, released" if isinstance(self.layers, Released) else table(self)

    @property
    def _open(self) -> Step | CapturedPass | None:
        """The pass that is under way, if somebody still has it: a pass keeps its cache, not the other way round."""
        return None if self._opened is None else self._opened()

    def _all(self) -> list[Layer]:
        return [layer for entry in self.layers for layer in entry.values()]

    def keeping(self, key: Key, rows: int, capacity: int | None, slack: int) -> Keeping:
        """How an entry is kept."""
        centre = self.centres.get(key)
        if centre is not None:  # over [B, H, S, D]
            centre = centre.to(self.device, torch.promote_types(self.dtype, torch.float32))[:, None]
        codec = self.codecs[key[0]]
        return Keeping(rows, capacity, slack, self.dtype, self.device, codec, centre, self.residence)

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
        if T < 1:
            raise InputError(f"a pass needs at least one token a row, not {T}")
        chosen = None if rows is None else row_numbers(rows, self.rows)
        numbers = list(range(self.rows)) if chosen is None else chosen
        if not numbers:
            raise InputError("a pass needs at least one row")
        if len(set(numbers)) != len(numbers):
            raise InputError(f"rows {numbers} name a row twice; repeat the row with cache.select to run it twice")
        real = None if counts is None else Counts.of(counts, len(numbers), T, self.device, "counts")
        if real is not None and real.out_of_range is not None:
            self.clock.doubt(real.out_of_range)
        if self.fetcher is not None:
            if not self.clock.exact:
                self.clock.sync()
            if real is not None:
                real.read()
        self._make_room(numbers, real, T)

        low, high = self.clock.low, self.clock.high
        most = [T] * len(numbers) if real is None else real.high
        self._check_sources([row for row, tokens in zip(numbers, most, strict=True) if tokens])
        first = low[numbers[0]] if numbers else 0
        one_length = all(low[row] == high[row] == first for row in numbers)
        index = None if chosen is None else on_device(numbers, self.device)
        before = self.lengths.clone() if index is None else self.lengths.index_select(0, index)
        step = Step(
            self.layers, T, before, None if real is None else real.tensor, cache=self, rows=chosen,
            start=first if one_length else None,
            bound=max((high[row] + n for row, n in zip(numbers, most, strict=True)), default=0),
            counts_high=most, counts_exact=real is None or real.low == real.high, spans=spans,
        )  # fmt: skip
        step.forgets = self.forgets
        step.base = self.clock.base.clone() if index is None else self.clock.base.index_select(0, index)
        if self.fetcher is not None:
            self.fetcher.reserve(self.layers, {i for i, _ in self.shared}, len(numbers))
            lengths = [low[row] for row in numbers]
            step.fetched = Fetched(self.fetcher, self.layers, numbers, chosen is None, lengths, most)
            step.fetched.begin(step)
        if T == 1:  # a ring takes one token in place
            self.clock.touch(1, index)
        self._close(self._open)
        self._opened = weakref.ref(step)
        return step

    def admit(self, one: CapturedPass, T: int, counts: Numbers) -> Counts:
        """Opens a pass of T tokens over all rows that runs elsewhere: checks and makes room, as `step` does."""
        if T < 1:
            raise InputError(f"a pass needs at least one token a row, not {T}")
        real = Counts.of(counts, self.rows, T, self.device, "counts")
        if real.out_of_range is not None:
            self.clock.doubt(real.out_of_range)
        self._make_room(list(range(self.rows)), real, T)
        self._close(self._open)
        self._opened = weakref.ref(one)
        return real

    def went_on(self, taken: Counts) -> None:
        """The pass that was admitted is committed: it took in so many tokens, and moved the marks on the device."""
        if taken.out_of_range is not None:
            self.clock.doubt(taken.out_of_range)
        self.clock.count_on(range(self.rows), taken.low, taken.high)
        self.clock.base_low = [max(*both) for both in zip(self.clock.base_low, self.clock.low, strict=True)]
        self._close(self._open)

    def _check_sources(self, rows: list[int]) -> None:
        if self.model is None or not any(isinstance(layer, CrossLayer) for layer in self._all()):
            return
        for row in rows:
            if not self.clock.sourced[row]:
                raise InputError(
                    f"this model reads a source, and row {row} has none: make one with model.encode(ids) and give it "
                    f"to model.new_cache(rows, source=source) or cache.attach(source, rows=[{row}])"
                )

    def _make_room(self, rows: list[int], counts: Counts | None, T: int) -> None:
        if max(self.clock.high[row] for row in rows) + T > min(self._room, self.record.shape[1]):
            self._grow(rows, counts, T)
        if self.pages is not None:
            self.pages.take(self.clock, rows, counts, T)

    def _grow(self, rows: list[int], counts: Counts | None, T: int) -> None:
        limit = self.limit
        room = min((layer.slots or 0 for layer in self._all() if getattr(layer, "grows", False)), default=None)

        def needed() -> list[int]:
            most = [T] * len(rows) if counts is None else counts.high
            return [self.clock.high[row] + n for row, n in zip(rows, most, strict=True)]

        bounds = [bound for bound in (limit, room) if bound is not None]
        if bounds and max(needed(), default=0) > min(bounds):
            self.clock.sync()
            if counts is not None:
                counts.read()
        need = needed()
        if limit is not None and max(need, default=0) > limit:
            row = rows[need.index(max(need))]
            raise self._full(row, self.clock.high[row], max(need) - self.clock.high[row], limit)
        # A pass of padding alone still needs a slot to point at.
        self._reserve(max(1, *need), max(self.clock.high[row] for row in rows) + T)

    def _full(self, row: int, length: int, more: int, limit: int) -> CapacityError:
        if limit == self.max_positions:
            return CapacityError(
                f"row {row} holds {length} tokens and {more} more were given, but the model has positions for {limit}. "
                "Use a shorter prompt, or take the row back with cache.rewind or cache.reset."
            )
        return CapacityError(
            f"row {row} holds {length} tokens and {more} more were given, but the capacity is {limit}. Make the cache "
            "with a larger capacity (or None, which grows), or take the row back with cache.rewind or cache.reset."
        )

    def _reserve(self, tokens: int, record: int) -> None:
        for layer in self._all():
            layer.reserve(tokens)
        self._room = max(self._room, tokens)
        have = self.record.shape[1]
        if record > have:
            new = allocate((self.rows, max(record, 2 * have)), torch.int64, self.device, -1)
            new[:, :have].copy_(self.record)
            self.record = new

    def _commit(self, step: Step, accepted: Numbers | None) -> None:
        if step.closed or step is not self._open:
            raise InputError(
                "this step is over: it was committed or aborted, or the cache was changed after it was opened"
            )
        counts, slack, clock = step._counts_high or [], self.slack, self.clock
        if accepted is None:
            taken, high = step.all_counts, counts
            low = counts if step.counts is None or step.counts_exact else [0] * len(counts)
        else:
            given = Counts.of(accepted, len(counts), counts, self.device, "accepted", step.counts)
            if given.out_of_range is not None:
                clock.doubt(given.out_of_range)
            if step.fetched is not None:
                step.fetched.taken = given.read()
            taken, low, high = given.tensor, given.low, given.high
        numbers = list(range(self.rows)) if step.rows is None else step.rows
        if self.pages is not None and step.T > 1:
            self.pages.take_rings(clock, numbers, high)
        after = [(row, clock.low[row] + a, clock.high[row] + b) for row, a, b in zip(numbers, low, high, strict=True)]
        step.folds = slack > 0 and any(most - clock.base_low[row] > 2 * slack for row, _, most in after)

        for (i, name), left in step._left.items():
            layer = self.layers[i][name]
            if step.fetched is not None and is_far(layer):
                layer.commit_far(step.fetched, step, left, taken)
            else:
                layer.commit(step, left, taken)

        base = step.base_after(taken) if slack else step.before + taken
        step.put(clock.base, base)
        for row, least, most in after:
            certain = least == most and most - clock.base_low[row] > 2 * slack
            clock.base_low[row] = most - slack if certain else max(clock.base_low[row], least - 2 * slack)
        self._keep_tokens(step)
        self._keep_logits(step, taken)
        clock.advance(numbers, None if step.rows is None else step.row_index, taken, low, high)
        self._close(step)

    def _keep_tokens(self, step: Step) -> None:
        ids = step.ids if step.ids is not None else torch.full_like(step.positions, -1)
        if step.start is not None:
            step.take(self.record)[:, step.start : step.start + step.T] = ids
            return
        places = step.before[:, None] + torch.arange(step.T, device=self.device)  # padding's lie past the row's end
        self.record[step.row_index[:, None], places] = ids.to(self.record)

    def _keep_logits(self, step: Step, taken: Tensor) -> None:
        logits = step.logits
        if logits is None:
            if self.logits is not None:
                known = step.take(self.logits)
                step.put(self.logits, known.masked_fill((taken > 0)[:, None], float("nan")))
            return
        kept = self.logits_kept(logits.shape[-1], logits.dtype)
        if logits.dim() == 3:
            last = (taken - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[-1])
            logits = logits.gather(1, last)[:, 0]
        elif taken is not step.all_counts:
            logits = logits.masked_fill((taken != step.all_counts)[:, None], float("nan"))
        step.put(kept, torch.where((taken > 0)[:, None], logits, step.take(kept)))

    def logits_kept(self, vocab: int, dtype: torch.dtype) -> Tensor:
        """Where each row's last logits are kept; made when they first are."""
        if self.logits is None:
            self.logits = allocate((self.rows, vocab), dtype, self.device, float("nan"))
        return self.logits

    def drop_open_step(self) -> None:
        """What is not committed by now never will be."""
        self._close(self._open)

    def _close(self, step: Step | CapturedPass | None) -> None:
        if step is not None:
            step.abort()
        self._opened = None

    # -- verbs in place --------------------------------------------------------------------------------------------

    def rewind(self, n: Numbers) -> Cache:
        """Takes each row back by its number of tokens, as if they had never been given."""
        lengths = self.clock.sync()
        amounts = Counts.of(n, self.rows, None, self.device, "rewind")
        host = amounts.read()
        possible = self.rewindable.tolist()
        for row, (back, length, most) in enumerate(zip(host, lengths, possible, strict=True)):
            if back > length:
                raise RewindError(f"row {row} holds {length} tokens and cannot be taken back by {back}")
            if back > most:
                raise RewindError(
                    f"row {row} cannot be taken back by {back}: of its {length} tokens, sliding windows and recurrent "
                    f"states can go back {most} (the cache's slack is {self.slack}). Make the cache with "
                    f"slack={back} or more, fork it before the tokens to be dropped, or reset the row."
                )
        self._close(self._open)
        changed = amounts.tensor > 0
        self.clock.take_back(amounts.tensor, host)
        for layer in self._all():
            layer.rewind(self.clock, changed)
        if self.pages is not None:
            self.pages.shrink(self.clock.low)
        if self.logits is not None:
            self.logits.masked_fill_(changed[:, None], float("nan"))
        return self

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> Cache:
        """Empties the rows (all when None); an attached source goes too."""
        numbers = list(range(self.rows)) if rows is None else row_numbers(rows, self.rows)
        self._close(self._open)
        index = on_device(numbers, self.device)
        self.clock.set_zero(numbers, index)
        for layer in self._all():
            layer.reset(index)
        if self.pages is not None:
            self.pages.reset(numbers)
        if self.logits is not None:
            self.logits.index_fill_(0, index, float("nan"))
        return self

    def reorder(self, rows: Sequence[int] | Tensor, since: int | Sequence[int] = 0) -> Cache:
        """Row i becomes what row rows[i] was: `select` in place, and copies only what rows do not have in common.

        since   how many first tokens rows i and rows[i] share, one for all or one for each i; rows that share some
                share their source too
        """
        from lamina.cache.reordering import reorder

        reorder(self, rows, since)
        return self

    def reserve(self, n: int) -> Cache:
        """Makes room for rows of n tokens now, so that no pass up to there has to grow. Pages of a pool are taken as
        tokens come."""
        if self.limit is not None and n > self.limit:
            raise CapacityError(f"cannot reserve {n} tokens: the capacity is {self.limit}; make a larger cache")
        self._reserve(n, n)
        if self.fetcher is not None:
            self.fetcher.reserve(self.layers, {i for i, _ in self.shared}, self.rows)
        return self

    def release(self) -> None:
        """Gives back all memory at once; the cache cannot be used any more. Pages are given back too when a cache is
        dropped, but when that is, Python says."""
        self._close(self._open)
        if self.pages is not None:
            self.pages.release()
        self.layers, self.pages, self.logits = Released(), None, None
        self.record = self.record[:, :0].clone()

    def attach(self, source: Source, rows: Sequence[int] | Tensor | None = None) -> Cache:
        """Gives the rows (all when None) their encoder output: computes every cross key and value at once."""
        numbers = list(range(self.rows)) if rows is None else row_numbers(rows, self.rows)
        if self.model is None or not any(isinstance(layer, CrossLayer) for layer in self._all()):
            raise InputError("this model reads no source: only encoder–decoder models do")
        if len(source.lengths) not in (1, len(numbers)):
            raise InputError(f"the source has {len(source.lengths)} rows, the cache takes it for {len(numbers)}")
        self._close(self._open)
        index = on_device(numbers, self.device)
        for (i, name), (k, v) in self.model.cross_states(source).items():
            layer = self.layers[i][name]
            assert isinstance(layer, CrossLayer)
            size = (len(numbers), -1, -1, -1)
            layer.attach(k.expand(size), v.expand(size), source.lengths.expand(len(numbers)), index)
        for row in numbers:
            self.clock.sourced[row] = True
        return self

    def poison(self, value: float = float("nan")) -> Cache:
        """Fills every number that no later pass may depend on: a way to prove that none does."""
        for layer in self._all():
            layer.poison(self.clock, value)
        if self.fetcher is not None:
            self.fetcher.poison()
        return self

    def save(self, path: str | os.PathLike[str], states: str | None = None) -> Cache:
        """Writes all rows into a file that `lamina.load_cache(path, model)` reads, here or in another process.

        The file is written whole or, whatever happens, not at all: one that was there before is still there then. To
        save some rows, select them first.

        states   "bfloat16" or "float16" rounds recurrent states in the file (see idle.py); they are exact when None

        >>> cache.select([0]).save("first.cache")                      # doctest: +SKIP
        """
        from lamina.cache.file import save

        save(self, path, states)
        return self

    # -- verbs that make caches ------------------------------------------------------------------------------------

    def select(self, rows: Sequence[int] | Tensor) -> Cache:
        """The given rows, in that order, as a cache of their own. A row may be named more than once."""
        numbers = row_numbers(rows, self.rows)
        if not numbers:
            raise InputError("select needs at least one row")
        index = on_device(numbers, self.device)
        layers = [{name: layer.select(index) for name, layer in entry.items()} for entry in self.layers]
        return self._made(
            layers,
            self.clock.select(numbers, index),
            self.record.index_select(0, index),
            None if self.logits is None else self.logits.index_select(0, index),
            None if self.pages is None else self.pages.select(numbers),
        )

    def repeat(self, n: int | Sequence[int]) -> Cache:
        """Each row n times in a row (or as often as its entry of n says)."""
        times = [n] * self.rows if isinstance(n, int) else list(n)
        if len(times) != self.rows or min(times) < 0 or sum(times) == 0:
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
        from lamina.cache.joining import join

        return join(caches, room)

    def _made(
        self,
        layers: list[dict[str, Layer]],
        clock: Clock,
        record: Tensor,
        logits: Tensor | None,
        pages: Tables | None,
    ) -> Cache:
        new = object.__new__(Cache)
        new.__dict__.update(self.__dict__)
        new.layers, new.clock, new._opened, new._room, new.pages = layers, clock, None, 0, pages
        if pages is not None:
            pages.bind(layers)
        new.fetcher = new._new_fetcher()
        new.record = allocate(record.shape, torch.int64, self.device)
        new.record.copy_(record)
        new.logits = None
        if logits is not None:
            new.logits = allocate(logits.shape, logits.dtype, self.device)
            new.logits.copy_(logits)
        return new


def shared_keys(specs: Sequence[Mapping[str, Any]]) -> frozenset[Key]:
    """The entries that other layers read."""
    return frozenset((spec.source, spec.name) for entry in specs for spec in entry.values() if isinstance(spec, Shared))
