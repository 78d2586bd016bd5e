"""A cache beside its plain model: each row is nothing but a list of ids.

Every operation is done to both. Whatever logits come out of a pass are compared with the uncached pass over each row's
list alone, with its numbers as the cache's codec writes them, and after any operation the cache must say about itself
what the lists say. That one comparison holds all the laws: chunking, independence, rewind, rows, layout, poison,
atomic, file.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import currently_in_test_context
from hypothesis import note as hypothesis_note
from torch import Tensor

from lamina import Cache, CapacityError, Pool, RewindError, load_cache
from lamina.cache.counts import Counts
from lamina.model import Logits, Model
from tests.laws.toys import CODECS, VOCAB, EncoderDecoder, Toy, assert_close, codec_for, toy, truth


def note(text: str) -> None:
    """Told when hypothesis prints a failing example."""
    if currently_in_test_context():
        hypothesis_note(text)


@dataclass
class Row:
    ids: list[int] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)  # what cache.tokens says: -1 where embeddings were fed
    source: tuple[int, ...] | None = None
    floor: int = 0  # the slack promises that the row can be taken back to this length
    logits_known: bool = False


def shared(one: Row, two: Row) -> int:
    """How many first tokens two rows have in common."""
    if one.source != two.source:
        return 0
    pairs = zip(zip(one.ids, one.shown, strict=True), zip(two.ids, two.shown, strict=True), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class Halfway(Exception):
    """Raised in the middle of a pass."""


@contextmanager
def raising_after(model: Toy, block: int) -> Iterator[None]:
    """Makes the model raise when that block has run."""

    def stop(*_: object) -> None:
        raise Halfway

    hook = model.blocks[block].register_forward_hook(stop)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def counts_on_the_device(pretend: bool = True) -> Iterator[None]:
    """Makes the host as ignorant of numbers per row as it is of tensors on another device."""
    if not pretend:
        yield
        return
    plain = Counts.of

    def unread(
        value: Any, rows: int, most: Any, device: torch.device, what: str, most_tensor: Tensor | None = None
    ) -> Counts:
        tops = most if isinstance(most, list) else [most] * rows
        given = torch.as_tensor(value).expand(rows)
        ceiling = torch.tensor(tops) if most_tensor is None else most_tensor
        clamped = torch.minimum(given.clamp(min=0), ceiling)
        return Counts(clamped, [0] * rows, list(tops), (clamped != given).any())

    Counts.of = staticmethod(unread)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Counts.of = staticmethod(plain)  # type: ignore[method-assign]


def pool_for(kind: str, page: int, slack: int = 0, codec: str | None = None) -> Pool:
    """A pool of pages of so many tokens."""
    codec = codec_for(kind, codec)
    return Pool(toy(kind), page=page, slack=slack, codec=codec and CODECS[codec])


def reloaded(cache: Cache, model: Model | None = None, pool: Pool | None = None) -> Cache:
    """What a file of it gives to its model, or to another; in that pool, where there is one."""
    reader = model or cache.model
    assert reader is not None
    with tempfile.TemporaryDirectory() as folder:
        cache.save(path := os.path.join(folder, "cache"))
        return load_cache(path, reader, residence=cache.residence, pool=pool)


class World:
    """One cache and its rows."""

    def __init__(self, kind: str, cache: Cache, rows: list[Row], rng: random.Random, codec: str | None = None) -> None:
        self.kind, self.cache, self.rows, self.rng, self.codec = kind, cache, rows, rng, codec
        self.model = toy(kind)

    @classmethod
    def fresh(
        cls,
        kind: str,
        rows: int = 1,
        capacity: int | None = None,
        slack: int = 0,
        seed: int = 0,
        codec: str | None = None,
        residence: str | int | Pool = "device",
    ) -> World:
        """In pages of a pool, where `residence` is one, or a number of tokens a page."""
        codec = codec_for(kind, codec)
        kept = None if codec is None else CODECS[codec]
        pool = pool_for(kind, residence, slack, codec) if isinstance(residence, int) else residence
        where = {"pool": pool} if isinstance(pool, Pool) else {"residence": pool}
        cache = toy(kind).new_cache(rows, capacity, slack, codec=kept, **where)
        world = cls(kind, cache, [Row() for _ in range(rows)], random.Random(seed), codec)
        world.attach(range(rows))
        return world

    # -- passes ----------------------------------------------------------------------------------------------------

    def feed(
        self,
        T: int,
        counts: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        accepted: Sequence[int] | None = None,
        fails_after: int | None = None,
        logits: Logits = "all",
        embeds: bool = False,
        poison: bool = True,
        unread: bool = False,
    ) -> None:
        """A pass of random tokens, checked.

        fails_after  the block after which it raises; -1: it is aborted
        unread       counts are on the device, where the host does not see them
        """
        note(f"  {T=} {counts=} {rows=} {accepted=} {fails_after=} {logits=} {embeds=} {poison=} {unread=}")
        chosen = list(range(len(self.rows))) if rows is None else list(rows)
        real = [T] * len(chosen) if counts is None else list(counts)
        new = [[self.rng.randrange(VOCAB) for _ in range(n)] for n in real]
        ids = torch.tensor([tokens + [-1] * (T - n) for tokens, n in zip(new, real, strict=True)])
        given: dict[str, Any] = {}
        if embeds:
            given["embeds"] = self.model.embed(ids.clamp(min=0)).masked_fill((ids < 0)[..., None], float("nan"))
        if poison:
            self.cache.poison()
        limit = self.cache.limit
        if limit is not None and any(len(self.rows[r].ids) + n > limit for r, n in zip(chosen, real, strict=True)):
            with pytest.raises(CapacityError):
                self.cache.step(T, counts, rows)
            return
        if fails_after is not None:
            self._fail(ids, counts, rows, fails_after, logits, given)
            return
        if rows is None and accepted is None and not unread:
            found = self.model(None if embeds else ids, cache=self.cache, counts=counts, logits=logits, **given)
        else:
            with counts_on_the_device(unread):
                step = self.cache.step(T, counts, rows)
                found = self.model.forward(None if embeds else ids, step, logits, **given)
                step.commit(accepted)
        self._check_logits(found, chosen, new, logits)
        for i, r in enumerate(chosen):
            taken = real[i] if accepted is None else accepted[i]
            self._take_in(self.rows[r], new[i][:taken], embeds)
            if taken:
                known = logits == "all" or (logits == "last" and taken == real[i])
                self.rows[r].logits_known = known

    def _fail(
        self, ids: Tensor, counts: Sequence[int] | None, rows: Sequence[int] | None, block: int, logits: Logits,
        given: dict[str, Any],
    ) -> None:  # fmt: skip
        tokens = None if given else ids
        if block < 0:
            step = self.cache.step(ids.shape[1], counts, rows)
            self.model.forward(tokens, step, logits, **given)
            step.abort()
            return
        with raising_after(self.model, block % len(self.model.blocks)), pytest.raises(Halfway):
            if rows is None:
                self.model(tokens, cache=self.cache, counts=counts, logits=logits, **given)
            else:
                self.model.forward(tokens, self.cache.step(ids.shape[1], counts, rows), logits, **given)

    def _take_in(self, row: Row, ids: list[int], embeds: bool) -> None:
        row.ids += ids
        row.shown += [-1] * len(ids) if embeds else ids
        row.floor = max(row.floor, len(row.ids) - self.cache.slack)

    def _check_logits(self, found: Tensor | None, chosen: list[int], new: list[list[int]], logits: Logits) -> None:
        if logits is None:
            assert found is None
            return
        assert found is not None
        for i, r in enumerate(chosen):
            if not new[i]:
                continue
            row = self.rows[r]
            expected = truth(self.kind, (*row.ids, *new[i]), row.source, self.codec)[len(row.ids) :]
            if logits == "last":
                assert_close(found[i], expected[-1], f"{self.kind}, row {r}, last logits")
            else:
                assert_close(found[i, : len(new[i])], expected, f"{self.kind}, row {r}, logits")

    # -- verbs in place --------------------------------------------------------------------------------------------

    def rewind(self, amounts: Sequence[int]) -> None:
        note(f"  by {amounts}")
        self.cache.rewind(list(amounts))
        for row, n in zip(self.rows, amounts, strict=True):
            if n:
                del row.ids[len(row.ids) - n :], row.shown[len(row.shown) - n :]
                row.logits_known = False

    def rewind_too_far(self, row: int, by: int = 1) -> None:
        amounts = [0] * len(self.rows)
        amounts[row] = int(self.cache.rewindable[row]) + by
        with pytest.raises(RewindError, match=f"row {row} "):
            self.cache.rewind(amounts)

    def reset(self, rows: Sequence[int]) -> None:
        self.cache.reset(list(rows))
        for r in rows:
            self.rows[r] = Row()
        self.attach(rows)

    def attach(self, rows: Sequence[int]) -> None:
        """Gives these rows a source of their own, where the model reads one."""
        if not isinstance(self.model, EncoderDecoder):
            return
        for r in rows:
            source = tuple(self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 6)))
            self.rows[r].source = source
            padded = [list(source) + [0] * self.rng.randint(0, 2)]
            self.cache.attach(self.model.encode(padded, counts=[len(source)]), rows=[r])

    def reorder(self, rows: Sequence[int], less: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was; what is said to be shared is `less` than what is, by that many tokens."""
        since = [
            max(0, shared(self.rows[i], self.rows[r]) - n) for i, (r, n) in enumerate(zip(rows, less, strict=True))
        ]
        note(f"  {rows=} {since=}")
        self.cache.reorder(list(rows), since)
        self.rows = [copy.deepcopy(self.rows[r]) for r in rows]

    # -- verbs that make caches ------------------------------------------------------------------------------------

    def made(self, cache: Cache, rows: Sequence[int]) -> World:
        """The world of a cache that was made of these rows."""
        own = [copy.deepcopy(self.rows[r]) for r in rows]
        return World(self.kind, cache, own, random.Random(self.rng.random()), self.codec)

    @staticmethod
    def join(worlds: list[World]) -> World:
        cache = Cache.join([world.cache for world in worlds])
        rows = [copy.deepcopy(row) for world in worlds for row in world.rows]
        return World(worlds[0].kind, cache, rows, worlds[0].rng, worlds[0].codec)

    # -- the check -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The cache says about itself what the lists say."""
        cache, lengths = self.cache, [len(row.ids) for row in self.rows]
        if cache.pool is not None:
            cache.pool.check()
        assert cache.rows == len(self.rows)
        assert cache.lengths.tolist() == lengths
        assert cache.tokens == [row.shown for row in self.rows]
        for r, (row, back) in enumerate(zip(self.rows, cache.rewindable.tolist(), strict=True)):
            promised = len(row.ids) - row.floor
            assert promised <= back <= len(row.ids), f"{self.kind}: row {r} can go back {back}, {promised} was promised"
            known = None if cache.logits is None else cache.logits[r]
            if row.logits_known:
                assert known is not None
                expected = truth(self.kind, tuple(row.ids), row.source, self.codec)[-1]
                assert_close(known, expected, f"{self.kind}, row {r}, cache.logits")
            else:
                assert known is None or bool(known.isnan().all()), f"{self.kind}: row {r} has logits of a token it lost"
