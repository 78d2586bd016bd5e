"""`PrefixStore`: keeps KV caches of earlier prompts, so that a prefix that prompts share is computed once.

    store = lamina.PrefixStore(model, bytes=2 * 2**30)
    model.generate(prompts, prefixes=store)      # reuses known prefixes, and stores prompts and answers
    print(store.explain(prompt))                 # how many tokens would be reused, and why not more

The store keeps *snapshots*: caches of one row, trimmed to their tokens and never changed. One is made at the end of
each prompt and each answer. A snapshot with attention layers only can be rewound to any of its tokens, so it serves
every prompt that shares a prefix with it, and shorter snapshots of the same sequence are dropped. Sliding windows that
have wrapped and recurrent states cannot be rewound. Models with such layers also get snapshots at *branch points*: if
a prompt diverges from known sequences and no snapshot can be rewound to that token, prefill stops there, stores a
snapshot and goes on. The next prompt that diverges there reuses it.

    kept   a b c d e f g             the state after g; recurrent, so it cannot be rewound to d
    fed    a b c d | x y             diverges after d: a snapshot is stored there during prefill
    next   a b c d   z               reuses four tokens

Logits at the ends of prompts are stored too, so a prompt that is repeated is not fed at all.

Snapshots share no memory: each stores all of its tokens. In a pool (`PrefixStore(model, bytes, pool=pool)`) they share
the pages of common prefixes, and starting from a snapshot copies no tokens. The least recently used snapshots are
dropped when the store's bytes are full, or when a generation needs pages of a pool of a fixed size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
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
    from lamina.generation.prefill.watch import Watch
    from lamina.model import Model

LOST = 64  # dropped or refused sequences whose ids `explain` still knows


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A cache of one row after some tokens of a sequence. It is never changed.

    ends    the fewest tokens that it can be rewound to, for each kind of layer that limits rewinding
    after   logits [1, V] after n tokens, by n: at the ends of prompts that are prefixes of it
    """

    ids: np.ndarray
    cache: Cache
    ends: dict[str, int]
    after: dict[int, Tensor]

    @staticmethod
    def of(
        cache: Cache, row: int, ids: np.ndarray, after: dict[int, Tensor], states: torch.dtype | None = None
    ) -> Snapshot:
        """A snapshot of this row of a cache. states: the dtype to round recurrent states to"""
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
        """Its memory, including pages that it shares with others."""
        own = self._cache_size
        covered = sum(logits.nbytes for n, logits in self.after.items() if n != len(self.ids))
        return replace(own, own=own.own + covered)

    @property
    def tables(self) -> dict[LayerGroup, PageNumbers]:
        """Copies of its page tables; empty without a pool."""
        pages = self.cache.pages
        return {} if pages is None else {table.group: table.numbers.copy() for table in pages.tables.values()}

    @cached_property
    def _cache_size(self) -> SnapshotSize:
        return snapshot_size(self.cache, 0)

    def knows(self, tokens: int) -> bool:
        """Whether it holds the logits after the first `tokens` tokens. NaN marks missing logits; reading that waits for
        the device, so it is checked here and not when the snapshot is made."""
        if tokens in self.after and bool(self.after[tokens][0, 0].isnan()):
            del self.after[tokens]
        return tokens in self.after

    @property
    def least(self) -> int:
        """The fewest tokens that it can be rewound to."""
        return max(self.ends.values(), default=0)

    def usable(self, ids: np.ndarray) -> int:
        """How many of these tokens need not be fed. The last one must be, unless the logits after it are known."""
        shared = common(ids, self.ids)
        if shared == len(ids) and not self.knows(shared):
            shared -= 1
        return shared if shared >= self.least else 0

    def first(self, tokens: int) -> Cache:
        """A cache of its first `tokens` tokens, to be joined with other rows: `join` copies them, or shares their
        pages."""
        if tokens == len(self.ids):
            return self.cache
        first = take_snapshot(self.cache, 0, tokens, borrow=True)
        first._logits = self.after.get(tokens)
        return first

    def covers(self, ids: np.ndarray) -> bool:
        """Whether rewinding it can give exactly these tokens."""
        return common(ids, self.ids) == len(ids) >= self.least


@dataclass(frozen=True)
class Lost:
    """A sequence that is not stored, and why."""

    ids: np.ndarray
    why: str


class PrefixStore:
    """Stores the caches of prompts and answers of one model, for `generate(..., prefixes=store)`. Threads may share it.

    bytes   the most memory that snapshots may take
    worth   a branch point is stored if it saves at least this many tokens of prefill
    states  "bfloat16" or "float16" rounds the recurrent states of snapshots to half of their bytes; a cache that starts
            from one has the exact dtype again. None stores them exactly
    pool    memory of the snapshots and of the caches that start from them, which then share its pages
    """

    def __init__(
        self, model: Model, bytes: int, worth: int = 8, states: str | None = None, pool: Pool | None = None
    ) -> None:
        if not _at_least_one(bytes):
            raise InputError(f"bytes={bytes!r}: it must be a number of bytes, at least 1, such as bytes=2 * 2**30")
        if not _at_least_one(worth):
            raise InputError(f"worth={worth!r}: it must be a number of tokens, at least 1")
        if any(spec.reads_source for entry in model.specs for spec in entry.values()):
            raise InputError(
                f"{type(model).__name__} reads a source, on which its cache depends: prefixes are for decoder-only "
                "models"
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
        """Bytes of all snapshots: layers, ids and logits; a shared page of a pool counts once."""
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
        """Drops all snapshots. Needed after the model's weights were changed."""
        with self._lock:
            self._kept.clear()
            self._lost.clear()

    # -- called by generate --------------------------------------------------------------------------------------------

    def _check(self, model: Model, prompt: Prompt, cache: Cache | None, use_cache: bool) -> None:
        """Raises if this store cannot serve a call of generate."""
        if cache is not None:
            raise InputError("a cache and prefixes were given, and both hold known tokens: leave one out")
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
        """-> a new cache with one row per prompt that holds its known prefix and has room for `room` tokens, and the
        length of each known prefix"""
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

    def _prefill(
        self, prompt: Prompt, rest: Sequence[Sequence[int]], cache: Cache, chunk: int | None, watch: Watch | None = None
    ) -> Tensor:
        """Feeds each row the ids that the cache does not hold (`rest`), in chunks as `feed.prefill` does, and stores
        snapshots at branch points and at the ends of prompts. -> logits after each row [B, V]"""
        held, whole = cache.clock.sync(), prompt.arrays
        points = self._branches(whole, held)
        if any(points):
            rows = zip(points, held, rest, strict=True)
            cuts = [point - length if point else len(row) for point, length, row in rows]
            first = from_rows([row[:cut] for row, cut in zip(rest, cuts, strict=True)], allow_empty=True)
            prefill(self.model, first, cache, chunk, watch)
            self._keep_rows(cache, {row: whole[row][:point] for row, point in enumerate(points) if point})
            rest = [row[cut:] for row, cut in zip(rest, cuts, strict=True)]
        logits = feed_rest(self.model, rest, cache, chunk, watch)
        self._keep_rows(cache, dict(enumerate(whole)))
        return logits

    def _keep_rows(self, cache: Cache, tokens: Mapping[int, np.ndarray] | None = None) -> None:
        """Stores snapshots of rows as they are now. tokens: row -> the ids that it holds; None: all rows"""
        if tokens is None:
            record = cache.record.cpu().numpy()
            tokens = {row: record[row, :length] for row, length in enumerate(cache.clock.sync())}
        for row, ids in tokens.items():
            with self._lock:
                self._keep_row(cache, row, ids.copy())

    # -- called by the pool when it runs out of pages ------------------------------------------------------------------

    def tables(self) -> list[Mapping[LayerGroup, PageNumbers]]:
        """Copies of the snapshots' page tables."""
        with self._lock:
            return [one.tables for one in self._kept]

    def drop(self, pages: Mapping[LayerGroup, set[int]]) -> bool:
        """Drops the least recently used snapshot that holds one of these pages; False if none does. A cache that was
        joined from the snapshot keeps its pages."""
        with self._lock:
            for at, one in enumerate(self._kept):
                held = one.tables
                if any(wanted & set(held[group].ravel().tolist()) for group, wanted in pages.items() if group in held):
                    self._lost.append(Lost(self._kept.pop(at).ids, "had to make room in the pool"))
                    return True
        return False

    # -- called with the lock held -------------------------------------------------------------------------------------

    def _find(self, ids: np.ndarray) -> tuple[Snapshot | None, int]:
        """The snapshot that saves most tokens of a prompt, and how many it saves; (None, 0) if there is none."""
        usable = [one.usable(ids) for one in self._kept]
        most = max(usable, default=0)
        return (self._kept[usable.index(most)], most) if most else (None, 0)

    def _touch(self, one: Snapshot) -> None:
        """Makes this snapshot the most recently used one."""
        self._kept.remove(one)
        self._kept.append(one)

    def _branches(self, fed: Sequence[np.ndarray], held: Sequence[int]) -> list[int]:
        """Per prompt, the length of the longest prefix that it shares with a stored sequence or another prompt of the
        call, if a snapshot there is worth it; else 0."""
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
        """Stores a snapshot of one row, unless another one covers it. Drops those that the new one covers, and the
        least recently used ones until it fits."""
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
        """Says for each prompt how many tokens would be reused, and why not more. Changes nothing.

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
                f"It cannot be rewound to {shared - (shared == len(ids))} tokens, only to {nearest.least} or more: "
                f"{' and '.join(kinds)} {'limits' if len(kinds) == 1 else 'limit'} that."
            )
            if shared == len(ids) or shared - tokens >= self.worth:
                said.append(f"When this prompt is fed, the state after {shared} tokens is kept.")
        elif tokens == shared - 1 == len(ids) - 1:
            said.append("The last token is fed for its logits.")
        return said


def _at_least_one(given: Any) -> bool:
    return isinstance(given, Real) and float(given) >= 1


def _sequences(number: int) -> str:
    return "1 sequence" if number == 1 else f"{number} sequences"


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two id arrays.

    >>> common(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
    2
    """
    both = min(len(a), len(b))
    differs = a[:both] != b[:both]
    return int(differs.argmax()) if differs.any() else both
