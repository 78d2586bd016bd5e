"""`PrefixStore`: what prompts begin with is computed once.

    store = lamina.PrefixStore(model, bytes=2 * 2**30)
    model.generate(prompts, prefixes=store)      # reuses what is known of each prompt, remembers prompts and answers
    print(store.explain(prompt))                 # how much would be reused, and why not more

The store keeps *snapshots*: caches of one row, without a slot to spare, that nobody changes any more. One is made at
the end of each prompt and of each answer. A snapshot of attention alone can be taken back to any of its tokens, so it
serves everything that begins like it, and a shorter one that it covers is dropped. Windows that have gone round and
recurrent states cannot be taken back. For them a state is also kept at *branch points*: where a prompt leaves what is
known, and no snapshot can be taken back to there, prefill stops, keeps the state and goes on. The next prompt that
leaves there finds it.

    kept   a b c d e f g             the state after g; recurrent, so it cannot go back to d
    fed    a b c d | x y             leaves after d: the state there is kept on the way
    next   a b c d   z               reuses four tokens

Logits at the ends of prompts are kept too, so a prompt that is asked again is not fed at all.

Snapshots share no memory: each holds all of its tokens. In pages of a pool (`PrefixStore(model, bytes, pool=pool)`)
they do: what begins alike lies there once, and starting from a snapshot copies no tokens. The least recently used ones
go when there is no room: in the store's bytes, or in a pool of a fixed size whose pages a generation needs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.io.state_dtype import state_dtype
from lamina.cache.ops.snapshot import SnapshotSize, snapshot_size, take_snapshot, total_bytes
from lamina.cache.summary import size
from lamina.errors import InputError
from lamina.generation.feed import feed_rest, prefill
from lamina.generation.prompt import Prompt, from_rows, prompt_of

if TYPE_CHECKING:
    from lamina.cache.pool.page_allocator import PageNumbers
    from lamina.cache.pool.pool import LayerGroup, Pool
    from lamina.model import Model

LOST = 64  # sequences that are remembered, as ids, for having gone or not been kept


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A cache of one row at some point of a sequence, which is never changed.

    ends    for each kind of layer that limits it, the fewest tokens that it can be taken back to
    after   logits [1, V] by the number of tokens they come after: at ends of prompts that it covers
    """

    ids: np.ndarray
    cache: Cache
    ends: dict[str, int]
    after: dict[int, Tensor]

    @staticmethod
    def of(
        cache: Cache, row: int, ids: np.ndarray, after: dict[int, Tensor], states: torch.dtype | None = None
    ) -> Snapshot:
        own = take_snapshot(cache, row, states=states)
        ends: dict[str, int] = {}
        for layer in own.every_layer():
            if (back := layer.rewindable(own.clock)) is not None:
                ends[layer.kind] = max(ends.get(layer.kind, 0), len(ids) - int(back))
        if own._logits is not None:
            after = after | {len(ids): own._logits}
        return Snapshot(ids, own, ends, after)

    @property
    def size(self) -> SnapshotSize:
        """What it takes, pages that it shares with others included."""
        own = self._cache_size
        covered = sum(logits.nbytes for n, logits in self.after.items() if n != len(self.ids))
        return replace(own, own=own.own + covered)

    @property
    def tables(self) -> dict[LayerGroup, PageNumbers]:
        """Copies of its page tables, none where it is in no pool."""
        pages = self.cache.pages
        return {} if pages is None else {table.group: table.numbers.copy() for table in pages.tables.values()}

    @cached_property
    def _cache_size(self) -> SnapshotSize:
        return snapshot_size(self.cache, 0)

    def knows(self, tokens: int) -> bool:
        """Whether it holds the logits after so many tokens. The device knows, and is asked when somebody wants it."""
        if tokens in self.after and bool(self.after[tokens][0, 0].isnan()):
            del self.after[tokens]
        return tokens in self.after

    @property
    def least(self) -> int:
        """The fewest tokens that it can be taken back to."""
        return max(self.ends.values(), default=0)

    def usable(self, ids: np.ndarray) -> int:
        """How many of these tokens need not be fed: the last one must be, unless its logits are known."""
        shared = common(ids, self.ids)
        if shared == len(ids) and not self.knows(shared):
            shared -= 1
        return shared if shared >= self.least else 0

    def first(self, tokens: int) -> Cache:
        """Its first tokens, to be joined with other rows, which copies them or shares their pages."""
        if tokens == len(self.ids):
            return self.cache
        first = take_snapshot(self.cache, 0, tokens, borrow=True)
        first._logits = self.after.get(tokens)
        return first

    def covers(self, ids: np.ndarray) -> bool:
        """Whether it can be taken back to just these tokens."""
        return common(ids, self.ids) == len(ids) >= self.least


@dataclass(frozen=True)
class Lost:
    """A sequence that is not kept, and why."""

    ids: np.ndarray
    why: str


class PrefixStore:
    """Remembers prompts and answers of one model, for `generate(..., prefixes=store)`. Threads may share it.

    bytes   the most that snapshots take
    worth   a branch point is kept if it saves at least so many tokens of prefill
    states  "bfloat16" or "float16" rounds the recurrent states of snapshots to half of their bytes; when a prompt goes
            on from one, they are in the exact dtype again. None keeps them exactly
    pool    where the caches that start here keep their tokens: snapshots, and what goes on from them, share its pages
    """

    def __init__(
        self, model: Model, bytes: int, worth: int = 8, states: str | None = None, pool: Pool | None = None
    ) -> None:
        if bytes < 1:
            raise InputError(f"bytes={bytes}: a prefix store needs room to keep anything, such as bytes=2 * 2**30")
        if worth < 1:
            raise InputError(f"worth={worth}: it is a number of tokens, at least 1")
        if any(spec.reads_source for entry in model.specs for spec in entry.values()):
            raise InputError(
                f"{type(model).__name__} reads a source, on which all it remembers depends: prefixes are for "
                "decoder-only models"
            )
        self.model, self.bytes, self.worth, self.pool = model, bytes, worth, pool
        self.states = state_dtype(states)
        self._made_for = (model.dtype, model.device)
        fresh = model.new_cache(pool=pool)
        self._limited = any(layer.rewindable(fresh.clock) is not None for layer in fresh.every_layer())
        self._kept: list[Snapshot] = []  # the least recently used first
        self._lost: deque[Lost] = deque(maxlen=LOST)
        self._lock = threading.RLock()  # taken before the pool's, never while that is held: see cache/pool/pool.py
        if pool is not None:
            pool.register_store(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots: their layers, ids and logits; a page of a pool counts once."""
        with self._lock:
            return total_bytes(one.size for one in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        with self._lock:
            return f"PrefixStore of {_sequences(len(self))}, {size(self.nbytes)} of {size(self.bytes)}"

    @property
    def sequences(self) -> list[list[int]]:
        """The ids of every snapshot, the least recently used first."""
        with self._lock:
            return [one.ids.tolist() for one in self._kept]

    def clear(self) -> None:
        """Forgets everything, as is needed after weights were changed."""
        with self._lock:
            self._kept.clear()
            self._lost.clear()

    # -- what generate calls -------------------------------------------------------------------------------------------

    def _check(self, model: Model, prompt: Prompt, cache: Cache | None, use_cache: bool) -> None:
        """Refuses a call of generate that this store cannot serve."""
        if cache is not None:
            raise InputError("a cache and prefixes were given, and both say what is known: leave one out")
        if not use_cache:
            raise InputError("use_cache=False and prefixes were given: leave one out")
        if model is not self.model:
            raise InputError("this prefix store was made for another model: make one with PrefixStore(model, bytes)")
        if (model.dtype, model.device) != self._made_for:
            dtype, device = self._made_for
            raise InputError(
                f"this prefix store was made when the model was in {dtype} on {device}, and it is in {model.dtype} on "
                f"{model.device} now: make another"
            )
        if prompt.embeds is not None:
            raise InputError("prefixes are found by ids: give ids instead of inputs_embeds, or leave prefixes out")

    def _start(self, prompts: Sequence[np.ndarray], room: int = 0) -> tuple[Cache, list[int]]:
        """A new cache with a row for each prompt, which holds what is known of it and has room for so many tokens; and
        how many tokens of each are known."""
        with self._lock:
            found = [self._find(ids) for ids in prompts]
            for one, _ in found:
                if one is not None:
                    self._touch(one)
        reused = [tokens for _, tokens in found]
        if not any(reused):
            return self.model.new_cache(len(prompts), pool=self.pool), reused
        firsts = [self.model.new_cache(pool=self.pool) if one is None else one.first(tokens) for one, tokens in found]
        return Cache.join(firsts, room), reused

    def _prefill(self, prompt: Prompt, rest: Sequence[Sequence[int]], cache: Cache, chunk: int | None) -> Tensor:
        """Feeds each row of the prompt the rest that the cache does not hold, as the function of that name does, and
        keeps branch points and ends."""
        held, whole = cache.clock.sync(), prompt.arrays
        points = self._branches(whole, held)
        if any(points):
            rows = zip(points, held, rest, strict=True)
            cuts = [point - length if point else len(row) for point, length, row in rows]
            first = from_rows([row[:cut] for row, cut in zip(rest, cuts, strict=True)], allow_empty=True)
            prefill(self.model, first, cache, chunk)
            self._keep_rows(cache, {row: whole[row][:point] for row, point in enumerate(points) if point})
            rest = [row[cut:] for row, cut in zip(rest, cuts, strict=True)]
        logits = feed_rest(self.model, rest, cache, chunk)
        self._keep_rows(cache, dict(enumerate(whole)))
        return logits

    def _keep_rows(self, cache: Cache, tokens: Mapping[int, np.ndarray] | None = None) -> None:
        """Remembers these rows as they are now, each with the tokens that it holds. None: all, as the cache tells."""
        if tokens is None:
            record = cache.record.cpu().numpy()
            tokens = {row: record[row, :length] for row, length in enumerate(cache.clock.sync())}
        for row, ids in tokens.items():
            with self._lock:
                self._keep_row(cache, row, ids.copy())

    # -- what the pool calls when it runs out of pages -----------------------------------------------------------------

    def tables(self) -> list[Mapping[LayerGroup, PageNumbers]]:
        """Copies of the snapshots' page tables."""
        with self._lock:
            return [one.tables for one in self._kept]

    def drop(self, pages: Mapping[LayerGroup, set[int]]) -> bool:
        """Drops the least recently used snapshot that holds one of these pages; False if none does. A prompt that is
        just going on from it keeps what it needs of it."""
        with self._lock:
            for at, one in enumerate(self._kept):
                held = one.tables
                if any(numbers & set(held[kind].ravel().tolist()) for kind, numbers in pages.items() if kind in held):
                    self._lost.append(Lost(self._kept.pop(at).ids, "had to make room in the pool"))
                    return True
        return False

    # -- inside the lock -----------------------------------------------------------------------------------------------

    def _find(self, ids: np.ndarray) -> tuple[Snapshot | None, int]:
        """The snapshot that saves most tokens of a prompt, and how many."""
        usable = [one.usable(ids) for one in self._kept]
        most = max(usable, default=0)
        return (self._kept[usable.index(most)], most) if most else (None, 0)

    def _touch(self, one: Snapshot) -> None:
        self._kept.remove(one)
        self._kept.append(one)

    def _branches(self, fed: Sequence[np.ndarray], held: Sequence[int]) -> list[int]:
        """For each prompt, where it leaves what is kept or fed beside it, and a snapshot is worth it; 0 for none."""
        if not self._limited:
            return [0] * len(fed)
        with self._lock:
            known = [one.ids for one in self._kept]
        points = []
        for ids, length in zip(fed, held, strict=True):
            shared = (common(ids, other) for other in [*known, *fed])
            point = max((tokens for tokens in shared if tokens < len(ids)), default=0)
            points.append(point if point - length >= self.worth else 0)
        return points

    def _keep_row(self, cache: Cache, row: int, ids: np.ndarray) -> None:
        covering = next((one for one in self._kept if one.covers(ids)), None)
        if covering is not None:
            logits = None if cache._logits is None else cache._logits[row : row + 1]
            if logits is not None and len(ids) not in covering.after and self.nbytes + logits.nbytes <= self.bytes:
                covering.after[len(ids)] = logits.clone()
            self._touch(covering)
            return
        needed = snapshot_size(cache, row, self.states)
        if needed.nbytes > self.bytes:
            self._lost.append(Lost(ids, f"takes {size(needed.nbytes)}, and the budget of all is {size(self.bytes)}"))
            return
        least = len(ids) - int(cache.rewindable[row]) if self._limited else 0
        covered = [one for one in self._kept if common(ids, one.ids) == len(one.ids) >= least]
        after = {tokens: logits for one in covered for tokens, logits in one.after.items() if tokens >= least}
        more = sum(logits.nbytes for logits in after.values())
        if needed.nbytes + more > self.bytes:
            after, more = {}, 0
        self._kept = [one for one in self._kept if one not in covered]
        while total_bytes([needed, *(one.size for one in self._kept)]) + more > self.bytes:
            self._lost.append(Lost(self._kept.pop(0).ids, "had to make room"))
        self._kept.append(Snapshot.of(cache, row, ids, after, self.states))

    # -- why -----------------------------------------------------------------------------------------------------------

    def explain(self, prompts: Any) -> str:
        """In words, for each prompt: how many tokens would be reused, and why not more. Nothing is changed by asking.

        >>> print(store.explain([5, 6, 7, 8]))                         # doctest: +SKIP
        2 of 4 tokens would be reused. The nearest of 3 sequences (6 tokens) differs at position 2: wanted 7, held 9.
        """
        rows = prompt_of(self.model, prompts).rows
        with self._lock:
            said = [" ".join(self._why(np.asarray(ids))) for ids in rows]
        return said[0] if len(said) == 1 else "\n".join(f"prompt {row}: {text}" for row, text in enumerate(said))

    def _why(self, ids: np.ndarray) -> list[str]:
        snapshot, tokens = self._find(ids)
        said = [f"{tokens} of {len(ids)} tokens would be reused."]
        if not self._kept:
            said.append("Nothing is kept.")
        else:
            nearest = max(reversed(self._kept), key=lambda one: (common(ids, one.ids), one is snapshot))
            said += self._nearest(ids, nearest, tokens)
        for lost in reversed(self._lost):
            if (shared := common(ids, lost.ids)) > tokens:
                said.append(
                    f"A sequence of {len(lost.ids)} tokens that shares {shared} is not kept: it {lost.why}. ({self!r}.)"
                )
                break
        return said

    def _nearest(self, ids: np.ndarray, nearest: Snapshot, tokens: int) -> list[str]:
        shared = common(ids, nearest.ids)
        what = f"The nearest of {_sequences(len(self._kept))} ({len(nearest.ids)} tokens)"
        if shared < min(len(ids), len(nearest.ids)):
            said = [f"{what} differs at position {shared}: wanted {ids[shared]}, held {nearest.ids[shared]}."]
        elif shared < len(ids):
            said = [f"{what} ends there."]
        elif shared < len(nearest.ids):
            said = [f"{what} holds them all and goes on."]
        else:
            said = [f"{what} is the same."]
        if tokens < shared and nearest.usable(ids) == 0:
            kinds = [kind for kind, end in nearest.ends.items() if end == nearest.least]
            said.append(
                f"It cannot be taken back to {shared - (shared == len(ids))} tokens, only to {nearest.least} or more: "
                f"{' and '.join(kinds)} {'limits' if len(kinds) == 1 else 'limit'} that."
            )
            if shared == len(ids) or shared - tokens >= self.worth:
                said.append(f"When this prompt is fed, the state after {shared} tokens is kept.")
        elif tokens == shared - 1 == len(ids) - 1:
            said.append("The last token is fed for its logits.")
        return said


def _sequences(number: int) -> str:
    return "1 sequence" if number == 1 else f"{number} sequences"


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids two sequences begin with in common.

    >>> common(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
    2
    """
    both = min(len(a), len(b))
    differs = a[:both] != b[:both]
    return int(differs.argmax()) if differs.any() else both
