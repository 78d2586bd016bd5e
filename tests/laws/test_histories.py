"""The heart of the laws: any history of operations on any kind of cache leaves it equal to plain lists of ids.

Hypothesis draws the kind, the layout, the slack, the rows and then the history. A failure is printed as the shortest
program that shows it.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.laws.budget import examples
from tests.laws.toys import KINDS, toy
from tests.laws.world import World

LOGITS = st.sampled_from(["all", "all", "all", "last", None])
WIDTHS = st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 11))
SLACKS = st.integers(0, 4)
SEEDS = st.integers(0, 2**16)


class Histories(RuleBasedStateMachine):
    """Some caches of one model at a time; every rule picks one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds: list[World] = []
        self.kind = ""
        self.grows = True

    @initialize(
        kind=st.sampled_from(KINDS), rows=st.integers(1, 3), grows=st.booleans(), room=st.integers(6, 40),
        slack=SLACKS, seed=SEEDS,
    )  # fmt: skip
    def begin(self, kind: str, rows: int, grows: bool, room: int, slack: int, seed: int) -> None:
        self.kind, self.grows = kind, grows
        self.worlds = [World.fresh(kind, rows, None if grows else room, slack, seed)]

    def world(self, data: st.DataObject) -> World:
        return self.worlds[data.draw(st.integers(0, len(self.worlds) - 1), label="cache")]

    def rows_of(self, world: World, data: st.DataObject, most: int | None = None) -> list[int]:
        """Some rows in any order, at least one."""
        return data.draw(
            st.lists(st.integers(0, len(world.rows) - 1), min_size=1, max_size=most or len(world.rows), unique=most is None),
            label="rows",
        )  # fmt: skip

    # -- passes ----------------------------------------------------------------------------------------------------

    @rule(data=st.data(), T=WIDTHS, logits=LOGITS, embeds=st.booleans(), poison=st.booleans())
    def append(self, data: st.DataObject, T: int, logits: str | None, embeds: bool, poison: bool) -> None:
        self.world(data).feed(T, logits=logits, embeds=embeds, poison=poison)  # type: ignore[arg-type]

    @rule(data=st.data(), T=WIDTHS, logits=LOGITS, embeds=st.booleans(), poison=st.booleans())
    def append_ragged(self, data: st.DataObject, T: int, logits: str | None, embeds: bool, poison: bool) -> None:
        world = self.world(data)
        counts = self._numbers(data, [T] * len(world.rows), "counts")
        world.feed(T, counts, logits=logits, embeds=embeds, poison=poison)  # type: ignore[arg-type]

    @rule(data=st.data(), T=WIDTHS, logits=LOGITS, partly=st.booleans(), poison=st.booleans())
    def append_to_some_rows(
        self, data: st.DataObject, T: int, logits: str | None, partly: bool, poison: bool
    ) -> None:
        """Only some rows run, and of what they are given only some tokens may be accepted."""
        world = self.world(data)
        rows = self.rows_of(world, data)
        counts = self._numbers(data, [T] * len(rows), "counts") if data.draw(st.booleans(), label="ragged") else None
        accepted = self._numbers(data, counts or [T] * len(rows), "accepted") if partly else None
        world.feed(T, counts, rows, accepted, logits=logits, poison=poison)  # type: ignore[arg-type]

    @rule(data=st.data(), T=WIDTHS, poison=st.booleans())
    def accept_some(self, data: st.DataObject, T: int, poison: bool) -> None:
        world = self.world(data)
        world.feed(T, accepted=self._numbers(data, [T] * len(world.rows), "accepted"), poison=poison)

    @rule(data=st.data(), T=WIDTHS, block=st.integers(-1, 2), some=st.booleans(), embeds=st.booleans())
    def fail(self, data: st.DataObject, T: int, block: int, some: bool, embeds: bool) -> None:
        world = self.world(data)
        rows = self.rows_of(world, data) if some else None
        counts = self._numbers(data, [T] * len(rows), "counts") if rows else None
        world.feed(T, counts, rows, fails_after=block, embeds=embeds)

    # -- verbs in place --------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        world = self.world(data)
        world.rewind(self._numbers(data, world.cache.rewindable.tolist(), "back"))

    @rule(data=st.data(), by=st.integers(1, 3))
    def rewind_too_far(self, data: st.DataObject, by: int) -> None:
        world = self.world(data)
        world.rewind_too_far(self.rows_of(world, data)[0], by)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        world = self.world(data)
        world.reset(self.rows_of(world, data))

    @rule(data=st.data(), tokens=st.integers(1, 50))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        cache = self.world(data).cache
        cache.reserve(tokens if cache.limit is None else min(tokens, cache.limit))

    # -- verbs that make caches ------------------------------------------------------------------------------------

    @rule(data=st.data())
    @precondition(lambda self: len(self.worlds) < 4)
    def select(self, data: st.DataObject) -> None:
        world = self.world(data)
        rows = self.rows_of(world, data, most=4)
        self.worlds.append(world.made(world.cache.select(rows), rows))

    @rule(data=st.data())
    @precondition(lambda self: len(self.worlds) < 4)
    def fork(self, data: st.DataObject) -> None:
        world = self.world(data)
        self.worlds.append(world.made(world.cache.fork(), range(len(world.rows))))

    @rule(data=st.data(), n=st.integers(1, 2))
    @precondition(lambda self: len(self.worlds) < 4)
    def repeat(self, data: st.DataObject, n: int) -> None:
        world = self.world(data)
        rows = [r for r in range(len(world.rows)) for _ in range(n)]
        if len(rows) <= 4:
            self.worlds.append(world.made(world.cache.repeat(n), rows))

    @rule(data=st.data())
    @precondition(lambda self: len(self.worlds) < 3)
    def split(self, data: st.DataObject) -> None:
        world = self.world(data)
        parts = [world.made(part, [r]) for r, part in enumerate(world.cache.split())]
        self.worlds.remove(world)
        self.worlds += parts

    @rule(slack=SLACKS, room=st.integers(6, 40), T=st.integers(1, 11), seed=SEEDS)
    @precondition(lambda self: len(self.worlds) < 4)
    def begin_another(self, slack: int, room: int, T: int, seed: int) -> None:
        world = World.fresh(self.kind, 1, None if self.grows else room, slack, seed)
        world.feed(T)
        self.worlds.append(world)

    @rule(data=st.data())
    @precondition(lambda self: len(self.worlds) > 1)
    def join(self, data: st.DataObject) -> None:
        one, two = self.world(data), self.world(data)
        if one is not two and len(one.rows) + len(two.rows) <= 5:
            self.worlds.append(World.join([one, two]))
            self.worlds.remove(data.draw(st.sampled_from([one, two]), label="dropped"))

    # -- always ----------------------------------------------------------------------------------------------------

    @invariant()
    def every_cache_says_what_its_lists_say(self) -> None:
        for world in self.worlds:
            world.check()

    def teardown(self) -> None:
        """Whatever happened, every cache still goes on as its lists do."""
        for world in self.worlds:
            width = random.Random(len(world.rows)).choice([1, 3])
            world.feed(width)
            world.check()

    @staticmethod
    def _numbers(data: st.DataObject, tops: list[int], label: str) -> list[int]:
        return data.draw(st.tuples(*(st.integers(0, top) for top in tops)).map(list), label=label)


TestHistories = Histories.TestCase
TestHistories.settings = examples(0.7, stateful_step_count=14)


def test_every_kind_of_spec_is_among_the_toys() -> None:
    from lamina.cache import spec

    known = {
        cls for cls in vars(spec).values()
        if isinstance(cls, type) and issubclass(cls, spec.Spec) and cls is not spec.Spec
    }  # fmt: skip
    used = {type(one) for kind in KINDS for entry in toy(kind).specs for one in entry.values()}
    assert known <= used
