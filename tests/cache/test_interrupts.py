"""An interrupt at any line leaves a cache as it was before the verb, or as it is after it, and it goes on rightly.

LAMINA_INTERRUPTS=all tries every line, which takes an hour; the usual run tries some, more of them where something is
being written.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lamina import Cache
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.cache.ops.begin import open_captured
from lamina.cache.ops.commit import device_commit
from lamina.cache.ops.journal import Change
from lamina.model import Model
from lamina.runtime.feed import read
from tests.cache.interrupting import interrupted, lines_of
from tests.generation.rows import made, model_of, scratch
from tests.laws.toys import truth
from tests.laws.world import Row, World, assert_close

EVERY = os.environ.get("LAMINA_INTERRUPTS") == "all"
WRITING, ELSEWHERE = 7, 3  # lines that are tried of each verb

KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "lines and rings": ("sliding and full", {}),
    "states, convolutions and lines": ("hybrid", {}),
    "the same on the host": ("hybrid", {"residence": "host"}),
    "in pages": ("sliding and full", {"residence": 3}),
    "states, with lines in pages": ("hybrid", {"residence": 3}),
    "in codes": ("wide heads", {"codec": "int8"}),
    "a source": ("cross", {}),
    "from outside": ("from outside, among others", {}),
}
TOKENS, MORE = [[3, 1, 4], [1, 5, 9]], [[2, 6], [5, 3]]


def one(world: World) -> None:
    world.model([[row[0]] for row in TOKENS], cache=world.cache)


def partly(world: World) -> None:
    step = world.cache.step(3)
    world.model.forward(torch.tensor(TOKENS), step)
    step.commit([1, 2])


def growing(world: World) -> None:
    world.model([TOKENS[0] * 12, TOKENS[1] * 12], cache=world.cache, counts=[36, 30])


VERBS: dict[str, tuple[Callable[[World], object], Callable[[list[Row]], list[list[int]]]]] = {
    "one token": (one, lambda rows: [row.ids + new[:1] for row, new in zip(rows, TOKENS, strict=True)]),
    "some of three tokens": (partly, lambda rows: [rows[0].ids + TOKENS[0][:1], rows[1].ids + TOKENS[1][:2]]),
    "growth": (growing, lambda rows: [rows[0].ids + TOKENS[0] * 12, rows[1].ids + TOKENS[1] * 10]),
    "rewind": (lambda world: world.cache.rewind([2, 1]), lambda rows: [rows[0].ids[:-2], rows[1].ids[:-1]]),
    "reset": (lambda world: world.cache.reset([1]), lambda rows: [rows[0].ids, []]),
    "reorder": (lambda world: world.cache.reorder([1, 0]), lambda rows: [rows[1].ids, rows[0].ids]),
    "select": (lambda world: world.cache.select([1, 1, 0]), lambda rows: [row.ids for row in rows]),
    "join": (lambda world: Cache.join([world.cache, world.cache]), lambda rows: [row.ids for row in rows]),
}


def begun(kept: str) -> World:
    kind, how = KEPT[kept]
    world = World.fresh(kind, 2, slack=2, **how)
    world.feed(9, [9, 6])
    world.feed(2, accepted=[1, 2])
    return world


def holds(world: World, rows: list[list[int]], sources: list[Any]) -> bool:
    """Whether the cache is what it says, and is these rows; then it goes on as they do."""
    cache, kind, codec = world.cache, world.kind, world.codec
    tokens = cache.tokens
    assert cache.lengths.tolist() == cache.clock.sync() == [len(row) for row in tokens]
    if cache.pool is not None:
        cache.pool.check()
    if tokens != rows:
        return False
    for row, source, known in zip(rows, sources, cache.logits, strict=True):  # type: ignore[arg-type]
        if row and not bool(known.isnan().all()):
            assert_close(known, truth(kind, tuple(row), source, codec)[-1], "kept logits")
    cache.poison()
    if not all(sources) and kind == "cross":
        return True
    for new in (MORE, [row[:1] for row in MORE]):
        found = world.model(new, cache=cache)
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        assert found is not None
        for row, more, source, logits in zip(rows, new, sources, found, strict=True):
            assert_close(logits, truth(kind, tuple(row), source, codec)[-len(more) :], "logits after it")
    back = [min(1, most) for most in cache.rewindable.tolist()]
    cache.rewind(back)
    assert cache.tokens == [row[: len(row) - n] for row, n in zip(rows, back, strict=True)]
    return True


def places(run: Callable[[], object], rng: random.Random) -> list[int]:
    """The lines to stop at: from where a change is noted on, and before."""
    lines = lines_of(run, "/cache")
    noted = next((i for i, (file, _) in enumerate(lines) if file == "journal.py"), len(lines))
    last = {place: i for i, place in enumerate(lines)}  # each line of the program once, where it ran last
    if EVERY:
        first = {place: i for i, place in reversed(list(enumerate(lines)))}
        return sorted({*first.values(), *last.values(), *range(noted, len(lines))})
    before, after = ([i for i in last.values() if (i >= noted) == late] for late in (False, True))
    return [*rng.sample(before, min(ELSEWHERE, len(before))), *rng.sample(after, min(WRITING, len(after)))]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kept", KEPT)
def test_a_verb_that_is_interrupted_is_not_begun_or_is_finished(kept: str, verb: str) -> None:
    world, rng = begun(kept), random.Random(f"{kept} {verb}")
    do, after = VERBS[verb]
    before = [row.ids for row in world.rows]
    pool = world.cache.pool
    sources = [row.source for row in world.rows]
    new_sources = {"reset": [sources[0], None], "reorder": sources[::-1]}
    do(world.made(world.cache.fork(), [0, 1]))  # a pool has grown by then, so that the next runs are of one length
    copied = world.made(world.cache.fork(), [0, 1])
    lines, reached = places(lambda: do(copied), rng), 0
    for at in lines:
        copied = world.made(world.cache.fork(), [0, 1])
        reached += interrupted(lambda: do(copied), at, "/cache")  # noqa: B023
        if rng.random() < 0.5:  # and again, while the next use finishes what was begun
            interrupted(lambda: copied.cache.lengths, rng.randrange(40), "/cache")  # noqa: B023
        ways = [(before, sources), (after(world.rows), new_sources.get(verb, sources))]
        found = [holds(copied, rows, given) for rows, given in ways]
        assert any(found), f"neither before nor after the verb: {copied.cache.tokens}"
    assert 2 * reached > len(lines)  # where pages had to be found, the first run was longer
    world.check()
    if pool is not None:
        world.cache.release()
        copied.cache.release()
        del copied
        gc.collect()
        assert pool.check().used == 0


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1"])
def test_a_prompt_of_empty_rows_that_is_interrupted_leaves_them_empty_or_is_fed(family: str) -> None:
    """Such a pass writes its states before commit (layers/recurrent.py)."""
    model, rng = model_of(family), random.Random(family)
    ids, more = torch.tensor(TOKENS), torch.tensor(MORE)
    expected = {0: model(more), 3: model(torch.cat([ids, more], dim=1))}

    def run(cache: Cache) -> None:
        model(ids, cache=cache, logits="last")

    lines = lines_of(lambda: run(model.new_cache(2)), "/cache")
    reached = 0
    for at in range(len(lines)) if EVERY else [*rng.sample(range(len(lines)), 25), *range(len(lines) - 8, len(lines))]:
        cache = model.new_cache(2)
        reached += interrupted(lambda: run(cache), at, "/cache")  # noqa: B023
        held = set(cache.lengths.tolist())
        assert held in ({0}, {3})
        logits, whole = model(more, cache=cache), expected[held.pop()]
        assert logits is not None and whole is not None
        torch.testing.assert_close(logits, whole[:, -2:], rtol=1e-4, atol=1e-5)
    assert reached


def test_a_prompt_of_empty_rows_that_is_aborted_or_dropped_leaves_no_state() -> None:
    model = model_of("mamba2")
    ids = torch.tensor(TOKENS)
    cache = model.new_cache(2)
    _, step = read(model, cache, ids, whole=True)
    states = [layer.data["head"] for layer in cache.every_layer() if isinstance(layer, RecurrentLayer)]
    assert all(state.any() for state in states)
    step.abort()
    assert not any(state.any() for state in states)
    _, step = read(model, cache, ids[:1], rows=[1], whole=True)
    assert all(state[1].any() and not state[0].any() for state in states)
    del step
    gc.collect()
    assert not any(state.any() for state in states)
    read(model, cache, ids, whole=True)[1].commit()
    assert all(state.any() for state in states)


def test_a_source_is_attached_to_all_layers_or_to_none() -> None:
    world, rng = begun("a source"), random.Random(0)
    world.cache.reset([1])
    source = world.model.encode([[7, 8, 9]], counts=[2])
    for at in places(lambda: world.cache.fork().attach(source, rows=[1]), rng):
        fork = world.cache.fork()
        interrupted(lambda: fork.attach(source, rows=[1]), at, "/cache")  # noqa: B023
        if not fork.clock.sourced[1]:
            fork.attach(source, rows=[1])
        found = world.model([[0, 0], [4, 5]], cache=fork.poison(), counts=[0, 2])
        assert found is not None
        assert_close(found[1], truth("cross", (4, 5), (7, 8)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2"])
def test_generate_that_is_interrupted_leaves_whole_tokens(family: str) -> None:
    """Whatever line it was at, tokens and lengths agree and the rows go on as if nothing had happened."""
    model, rng = model_of(family), random.Random(family)
    prompts = [[5, 6, 7], [8, 9]]

    def run(cache: Cache) -> None:
        made(model, prompts, new=4, cache=cache)

    lines = len(lines_of(lambda: run(model.new_cache(2, slack=1))))
    tried = range(lines) if EVERY else sorted(rng.sample(range(lines), 6))
    for at in tried:
        cache = model.new_cache(2, slack=1)
        interrupted(lambda: run(cache), at)  # noqa: B023
        rows = cache.tokens
        assert cache.lengths.tolist() == [len(row) for row in rows]
        cache.poison()
        found = made(model, [[3], [4]], new=2, cache=cache, whole=False)
        assert found.tokens == scratch(model, [[*row, new] for row, new in zip(rows, (3, 4), strict=True)], new=2)


def test_an_action_is_done_once_wherever_it_is_cut() -> None:
    def change(numbers: list[int]) -> Change:
        new = Change()
        new.add(lambda: numbers[::-1], lambda turned: numbers.__setitem__(slice(None), turned))
        new.add(lambda: [2 * n for n in numbers], lambda doubled: numbers.__setitem__(slice(None), doubled))
        new.write(lambda: numbers.__setitem__(0, 7))
        return new

    lines = len(lines_of(change([1, 2]).finish))
    for first in range(lines):
        for second in range(lines):
            numbers = [1, 2]
            one = change(numbers)
            interrupted(one.finish, first)
            interrupted(one.finish, second)
            one.finish()
            assert numbers == [7, 2]


def test_a_pass_that_was_committed_when_the_interrupt_came_is_not_committed_twice() -> None:
    model: Model = model_of("llama")
    lines = len(lines_of(lambda: _committed(model), "/cache"))
    for at in range(0, lines, 1 if EVERY else 9):
        cache = model.new_cache()
        model([[1, 2]], cache=cache)
        step = cache.step(1)
        model.forward(torch.tensor([[3]]), step)
        interrupted(step.commit, at, "/cache")
        if cache.tokens == [[1, 2, 3]]:
            with pytest.raises(ValueError, match="this step is closed"):
                step.commit()
        assert cache.tokens in ([[1, 2]], [[1, 2, 3]])


def _committed(model: Model) -> None:
    cache = model.new_cache()
    step = cache.step(1)
    model.forward(torch.tensor([[3]]), step)
    step.commit()


class Elsewhere:
    """Stands for a captured pass: the device commits it."""

    over = False

    def close(self) -> None:
        self.over = True


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_the_host_knows_the_lengths_whenever_a_pass_is_committed_on_the_device(moved: bool, cut: bool) -> None:
    model = model_of("llama")
    cache, one = model.new_cache(2), Elsewhere()
    model([[1, 2, 3], [4, 5, 6]], cache=cache)
    taken = open_captured(cache, one, 2, [2, 1])  # type: ignore[arg-type]

    def launch() -> None:
        with device_commit(cache, taken.low, taken.high):
            if moved:
                cache.clock.lengths.add_(taken.tensor)
            if cut:
                raise KeyboardInterrupt
            assert all(a <= n <= b for a, n, b in zip(cache.clock.low, cache.lengths, cache.clock.high, strict=True))

    if cut:
        with pytest.raises(KeyboardInterrupt):
            launch()
    elif moved:
        launch()
        assert one.over and cache.clock.exact
    assert cache.clock.sync() == cache.lengths.tolist() == ([5, 4] if moved else [3, 3])


def test_the_host_knows_the_lengths_whenever_captured_steps_are_interrupted() -> None:
    cache = model_of("llama").new_cache(2)
    cache.clock.expect_advance(4)
    assert cache.clock.sync() == [0, 0]  # nothing was launched
    cache.clock.expect_advance(4)
    cache.clock.lengths.add_(torch.tensor([3, 1]))
    assert cache.clock.sync() == [3, 1]
