"""The heart of the laws: any history of operations on any kind of cache leaves it equal to plain lists of ids.

Hypothesis draws the kind, the layout, the codec, the residence, the slack, the rows and the history: a list of
operations, each with a number that settles its details. A failure is printed as the shortest history that shows it,
details and all.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

from hypothesis import given, note
from hypothesis import strategies as st

from tests.laws.budget import examples
from tests.laws.toys import CODECS, KINDS, toy
from tests.laws.world import World, pool_for, reloaded

OPERATIONS: dict[str, Callable[[History, random.Random], None]] = {}


def operation(does: Callable[[History, random.Random], None]) -> Callable[[History, random.Random], None]:
    OPERATIONS[does.__name__] = does
    return does


class History:
    """Up to three caches of one model; every operation picks one of them."""

    def __init__(
        self, kind: str, rows: int, grows: bool, slack: int, seed: int, codec: str | None, residence: str | int
    ) -> None:
        self.kind, self.grows, self.codec = kind, grows, codec
        self.pool = pool_for(kind, residence, slack, codec) if isinstance(residence, int) else None
        self.residence = residence if isinstance(residence, str) else "device"
        rng = random.Random(seed)
        self.worlds = [World.fresh(kind, rows, self.room(rng), slack, seed, codec, self.pool or self.residence)]
        self.worlds[0].feed(T := rng.choice([1, 5, 12]), some(rng, [T] * rows))

    def room(self, rng: random.Random) -> int | None:
        """A capacity: None, or more or less than what is going to be asked for."""
        return None if self.grows else rng.choice([12, 30, 80])

    def run(self, name: str, rng: random.Random) -> None:
        OPERATIONS[name](self, rng)
        for world in self.worlds:
            world.check()

    def one(self, rng: random.Random) -> World:
        world = rng.choice(self.worlds)
        note(f"  on cache {self.worlds.index(world)}, lengths {[len(row.ids) for row in world.rows]}")
        return world

    def finish(self) -> None:
        """Whatever happened, every cache still goes on as its lists do."""
        for i, world in enumerate(self.worlds):
            world.feed(1 + 2 * (i % 2))
            world.check()

    # -- passes ----------------------------------------------------------------------------------------------------

    @operation
    def append(self, rng: random.Random) -> None:
        self.one(rng).feed(width(rng), poison=maybe(rng), embeds=maybe(rng), logits=rng.choice(["all", "last", None]))

    @operation
    def append_one(self, rng: random.Random) -> None:
        self.one(rng).feed(1, poison=maybe(rng))

    @operation
    def append_ragged(self, rng: random.Random) -> None:
        world, T = self.one(rng), width(rng)
        counts = some(rng, [T] * len(world.rows))
        world.feed(T, counts, poison=maybe(rng), embeds=maybe(rng), logits=rng.choice(["all", "last", None]))

    @operation
    def append_to_some_rows(self, rng: random.Random) -> None:
        """Only some rows run, and of what they are given only some tokens may be accepted."""
        world, T = self.one(rng), width(rng)
        rows = some_rows(rng, world)
        counts = some(rng, [T] * len(rows)) if maybe(rng) else None
        accepted = some(rng, counts or [T] * len(rows)) if maybe(rng) else None
        world.feed(T, counts, rows, accepted, poison=maybe(rng), logits=rng.choice(["all", "last", None]))

    @operation
    def accept_some(self, rng: random.Random) -> None:
        world, T = self.one(rng), width(rng)
        world.feed(T, accepted=some(rng, [T] * len(world.rows)), poison=maybe(rng))

    @operation
    def append_unread(self, rng: random.Random) -> None:
        """The numbers of tokens are on the device: the host knows bounds, and asks only when it must."""
        world, T = self.one(rng), width(rng)
        rows = some_rows(rng, world) if maybe(rng) else None
        real = some(rng, [T] * len(rows or world.rows))
        accepted = some(rng, real) if maybe(rng) else None
        for _ in range(rng.randint(1, 2)):
            world.feed(T, real, rows, accepted, poison=maybe(rng), unread=True)

    @operation
    def fail(self, rng: random.Random) -> None:
        """A block raises, or the pass is aborted."""
        world, T = self.one(rng), width(rng)
        rows = some_rows(rng, world) if maybe(rng) else None
        counts = some(rng, [T] * len(rows)) if rows else None
        world.feed(T, counts, rows, fails_after=rng.randint(-1, 2), embeds=maybe(rng), poison=maybe(rng))

    # -- verbs in place --------------------------------------------------------------------------------------------

    @operation
    def rewind(self, rng: random.Random) -> None:
        world = self.one(rng)
        world.rewind(some(rng, world.cache.rewindable.tolist()))

    @operation
    def rewind_a_little(self, rng: random.Random) -> None:
        world = self.one(rng)
        world.rewind([min(rng.randint(0, 2), back) for back in world.cache.rewindable.tolist()])

    @operation
    def rewind_too_far(self, rng: random.Random) -> None:
        world = self.one(rng)
        world.rewind_too_far(rng.randrange(len(world.rows)), rng.randint(1, 3))

    @operation
    def reset(self, rng: random.Random) -> None:
        world = self.one(rng)
        world.reset(some_rows(rng, world))

    @operation
    def reorder(self, rng: random.Random) -> None:
        world = self.one(rng)
        count = len(world.rows)
        world.reorder(rng.choices(range(count), k=count), some(rng, [2] * count))

    @operation
    def reserve(self, rng: random.Random) -> None:
        cache, tokens = self.one(rng).cache, rng.randint(1, 70)
        cache.reserve(tokens if cache.limit is None else min(tokens, cache.limit))

    # -- verbs that make caches ------------------------------------------------------------------------------------

    def keep(self, world: World, rng: random.Random) -> None:
        if len(self.worlds) == 3:
            self.worlds.remove(rng.choice(self.worlds))
        self.worlds.append(world)

    @operation
    def select(self, rng: random.Random) -> None:
        world = self.one(rng)
        rows = rng.choices(range(len(world.rows)), k=rng.randint(1, 4))
        self.keep(world.made(world.cache.select(rows), rows), rng)

    @operation
    def fork(self, rng: random.Random) -> None:
        world = self.one(rng)
        self.keep(world.made(world.cache.fork(), range(len(world.rows))), rng)

    @operation
    def repeat(self, rng: random.Random) -> None:
        world = self.one(rng)
        times = [rng.randint(0, 1) for _ in world.rows]
        times[rng.randrange(len(times))] = 2
        rows = [r for r, often in enumerate(times) for _ in range(often)]
        self.keep(world.made(world.cache.repeat(times), rows), rng)

    @operation
    def split(self, rng: random.Random) -> None:
        world = self.one(rng)
        for r, part in enumerate(world.cache.split()):
            self.keep(world.made(part, [r]), rng)

    @operation
    def join(self, rng: random.Random) -> None:
        """With a cache of another capacity and slack, in the pool or not, or with another of this history."""
        one, others = self.one(rng), [world for world in self.worlds if len(world.rows) < 4]
        two = rng.choice(others) if others and maybe(rng) else one
        if two is one:
            pool, slack = self.pool if maybe(rng) else None, rng.randint(0, 4)
            if self.pool is not None:  # it takes no more slack than it has
                slack = min(slack, self.pool.slack) if pool is None else self.pool.slack
            where = pool or self.residence
            two = World.fresh(self.kind, 1, self.room(rng), slack, rng.randint(0, 99), self.codec, where)
            for _ in range(rng.randint(0, 3)):
                two.feed(width(rng))
        both = [one, two] if maybe(rng) else [two, one]
        if len(one.rows) + len(two.rows) <= 5:
            self.keep(World.join(both), rng)

    @operation
    def go_through_a_file(self, rng: random.Random) -> None:
        world = self.one(rng)
        fits = self.pool is not None and self.pool.slack == world.cache.slack
        world.cache = reloaded(world.cache, pool=self.pool if fits and maybe(rng) else None)


def maybe(rng: random.Random) -> bool:
    return rng.random() < 0.5


def width(rng: random.Random) -> int:
    return rng.choice([1, 1, 2, 3, 4, rng.randint(1, 11)])


def some(rng: random.Random, tops: list[int]) -> list[int]:
    """For each a number up to its top, often the top or nothing."""
    return [rng.choice([0, top, rng.randint(0, top), rng.randint(0, top)]) for top in tops]


def some_rows(rng: random.Random, world: World) -> list[int]:
    return rng.sample(range(len(world.rows)), rng.randint(1, len(world.rows)))


FREQUENT = ["append", "append_one", "append_ragged", "append_to_some_rows", "accept_some", "fail", "rewind", "join"]
# A failing history shrinks towards the first: what does not matter falls away.
NAMES = ["nothing", *FREQUENT, *OPERATIONS]


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 3),
    grows=st.booleans(),
    slack=st.integers(0, 4),
    seed=st.integers(0, 2**16),
    codec=st.sampled_from([*[None] * len(CODECS), *CODECS]),
    residence=st.sampled_from(["device", "host", 4, 3, 1]),  # a number: in pages of so many tokens
    history=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2**16)), min_size=10, max_size=30),
)
@examples(0.7)
def test_any_history_leaves_a_cache_equal_to_plain_lists_of_ids(
    kind: str,
    rows: int,
    grows: bool,
    slack: int,
    seed: int,
    codec: str | None,
    residence: str | int,
    history: list[tuple[str, int]],
) -> None:
    caches = History(kind, rows, grows, slack, seed, codec, residence)
    for i, (name, number) in enumerate(history):
        if name != "nothing":
            note(name)
            caches.run(name, random.Random(number * 100 + i))
    note("at the end")
    caches.finish()
    if caches.pool is not None:
        caches.worlds.clear()
        if caches.pool.check().used:
            gc.collect()  # what raised in the middle of a pass may have left frames behind
        assert caches.pool.check().used == 0, "caches are gone, and some of their pages are not free"


def test_every_kind_of_spec_is_among_the_toys() -> None:
    from lamina.cache import spec

    known = {
        cls for cls in vars(spec).values()
        if isinstance(cls, type) and issubclass(cls, spec.Spec) and cls is not spec.Spec
    }  # fmt: skip
    used = {type(one) for kind in KINDS for entry in toy(kind).specs for one in entry.values()}
    assert known <= used
