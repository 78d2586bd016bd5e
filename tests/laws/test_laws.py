"""Each law by itself, in the words of its statement. The histories of `test_histories` mix them all."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lamina import Cache, RewindError
from tests.laws.budget import examples
from tests.laws.toys import CODECS, KINDS, EncoderDecoder, assert_close, codec_for, random_ids, toy, truth
from tests.laws.world import Halfway, World, pool_for, raising_after, reloaded

LENGTH = 26  # more than four times the windows of the toys
SHARE = 0.3 / 10

kinds, seeds, slacks = st.sampled_from(KINDS), st.integers(0, 2**16), st.integers(0, 4)
capacities = st.sampled_from([None, 3 * LENGTH])
codecs = st.sampled_from([*[None] * len(CODECS), *CODECS])
residences = st.sampled_from(["device", "host", 4, 3])  # a number: in pages of so many tokens


def new_cache(
    kind: str,
    rows: int,
    capacity: int | None = None,
    slack: int = 0,
    seed: int = 0,
    codec: str | None = None,
    residence: str | int = "device",
) -> tuple[Cache, list]:
    """A cache and, for each row, what `truth` needs to know of its source."""
    model = toy(kind)
    sources: list = [None] * rows
    kept = None if codec is None else CODECS[codec]
    if isinstance(residence, int):
        cache = model.new_cache(rows, capacity, slack, pool=pool_for(kind, residence, slack, codec))
    else:
        cache = model.new_cache(rows, capacity, slack, codec=kept, residence=residence)
    if isinstance(model, EncoderDecoder):
        ids = random_ids(rows, 5, seed + 1)
        cache.attach(model.encode(ids))
        sources = [tuple(row) for row in ids.tolist()]
    return cache, sources


def expected(kind: str, ids: Tensor, sources: list, codec: str | None = None) -> Tensor:
    rows = zip(ids.tolist(), sources, strict=True)
    return torch.stack([truth(kind, tuple(row), source, codec) for row, source in rows])


def cuts(length: int, rng: random.Random) -> list[int]:
    pieces: list[int] = []
    while sum(pieces) < length:
        pieces.append(min(rng.choice([1, 1, 2, 3, rng.randint(1, length)]), length - sum(pieces)))
    return pieces


def maybe(rng: random.Random) -> bool:
    return rng.random() < 0.5


def run(kind: str, ids: Tensor, cache: Cache, pieces: list[int], poison: bool = False) -> Tensor:
    outs = []
    for piece in ids.split(pieces, dim=1):
        if poison:
            cache.poison()
        outs.append(toy(kind)(piece, cache=cache))
    return torch.cat(outs, dim=1)  # type: ignore[arg-type]


@given(
    kind=kinds,
    codec=codecs,
    capacity=capacities,
    slack=slacks,
    residence=residences,
    rows=st.integers(1, 3),
    seed=seeds,
)
@examples(SHARE)
def test_chunking_any_cut_gives_the_logits_of_one_uncached_pass(
    kind: str, codec: str | None, capacity: int | None, slack: int, residence: str | int, rows: int, seed: int
) -> None:
    ids, codec = random_ids(rows, LENGTH, seed), codec_for(kind, codec)
    cache, sources = new_cache(kind, rows, capacity, slack, codec=codec, residence=residence)
    found = run(kind, ids, cache, cuts(LENGTH, random.Random(seed)))
    assert_close(found, expected(kind, ids, sources, codec), kind)


@given(
    kind=kinds,
    codec=codecs,
    capacity=capacities,
    slack=slacks,
    residence=residences,
    rows=st.integers(2, 5),
    seed=seeds,
)
@examples(SHARE)
def test_independence_a_row_does_not_depend_on_neighbours_padding_or_the_batch(
    kind: str, codec: str | None, capacity: int | None, slack: int, residence: str | int, rows: int, seed: int
) -> None:
    rng = random.Random(seed)
    together = World.fresh(kind, rows, capacity, slack, seed, codec, residence)
    for _ in range(6):
        T = rng.randint(1, 5)
        together.feed(T, [rng.randint(0, T) for _ in range(rows)], embeds=rng.random() < 0.5)
    together.check()


@given(kind=kinds, codec=codecs, capacity=capacities, slack=slacks, residence=residences, seed=seeds)
@examples(SHARE)
def test_rewind_append_then_rewind_is_as_if_never_appended(
    kind: str, codec: str | None, capacity: int | None, slack: int, residence: str | int, seed: int
) -> None:
    rng, codec = random.Random(seed), codec_for(kind, codec)
    ids, other = random_ids(2, LENGTH, seed), random_ids(2, LENGTH, seed + 1)
    cache, sources = new_cache(kind, 2, capacity, slack, codec=codec, residence=residence)
    outs = []
    for piece in ids.split(cuts(LENGTH, rng), dim=1):
        outs.append(toy(kind)(piece, cache=cache))
        for _ in range(rng.randint(0, 3)):  # more than one rewind at the same place
            stray = rng.randint(0, slack)
            if stray:
                run(kind, other[:, :stray], cache, cuts(stray, rng))
                assert (cache.rewindable >= stray).all()
                cache.rewind(stray).poison()
    assert_close(torch.cat(outs, dim=1), expected(kind, ids, sources, codec), kind)  # type: ignore[arg-type]


@given(kind=kinds, codec=codecs, capacity=capacities, slack=slacks, residence=residences, seed=seeds)
@examples(SHARE)
def test_rewind_goes_exactly_as_far_as_is_said_and_refuses_more_without_a_change(
    kind: str, codec: str | None, capacity: int | None, slack: int, residence: str | int, seed: int
) -> None:
    rng = random.Random(seed)
    world = World.fresh(kind, 2, capacity, slack, seed, codec, residence)
    for _ in range(4):
        world.feed(T := rng.randint(1, 9), [rng.randint(1, T) for _ in range(2)])
        row, other = rng.sample(range(2), 2)
        too_far = [0, 0]
        too_far[row], too_far[other] = int(world.cache.rewindable[row]) + 1, int(world.cache.rewindable[other])
        before, how_far = world.cache.tokens, world.cache.rewindable.tolist()
        with pytest.raises(RewindError):
            world.cache.rewind(too_far)
        assert (world.cache.tokens, world.cache.rewindable.tolist()) == (before, how_far)
        too_far[row] -= 1
        world.rewind(too_far)
        world.check()
        world.feed(rng.randint(1, 3))


@given(kind=kinds, codec=codecs, capacity=capacities, slack=slacks, residence=residences, seed=seeds)
@examples(SHARE)
def test_rows_verbs_are_indexing_and_never_change_their_parents(
    kind: str, codec: str | None, capacity: int | None, slack: int, residence: str | int, seed: int
) -> None:
    rng = random.Random(seed)
    parent = World.fresh(kind, 3, capacity, slack, seed, codec, residence)
    parent.feed(9, [rng.randint(0, 9) for _ in range(3)])
    parent.feed(1)
    rows = rng.choices(range(3), k=4)
    own = rng.randint(0, 4) if isinstance(residence, str) else slack  # a pool takes no more slack than it has
    stranger = World.fresh(kind, 1, None if capacity is None else capacity + 7, own, seed, codec, residence)
    stranger.feed(rng.randint(1, 12))
    children = [
        parent.made(parent.cache.select(rows), rows),
        parent.made(parent.cache.repeat(2), [0, 0, 1, 1, 2, 2]),
        parent.made(parent.cache.fork(), range(3)),
        *(parent.made(part, [r]) for r, part in enumerate(parent.cache.split())),
        World.join([parent, stranger]),
        World.join([stranger, parent, stranger]),
    ]
    for world in [*children, parent, stranger]:  # each goes its own way; those after it must not have noticed
        world.check()
        world.feed(rng.choice([1, 4]))
        world.rewind([min(1, back) for back in world.cache.rewindable.tolist()])
        world.feed(rng.choice([1, 4]))
        world.check()
        world.cache.poison(7.0).reset()


@given(kind=kinds, capacity=capacities, slack=slacks, residence=residences, seed=seeds)
@examples(SHARE)
def test_rows_reorder_is_select_in_place_whatever_rows_have_in_common(
    kind: str, capacity: int | None, slack: int, residence: str | int, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = World.fresh(kind, 2, capacity, slack, seed, residence=residence)
    prompts.feed(9, [rng.randint(1, 9) for _ in range(2)])
    beams = prompts.made(prompts.cache.repeat(3), [0, 0, 0, 1, 1, 1])
    for _ in range(6):
        beams.feed(
            T := rng.choice([1, 1, 2, 5]), accepted=[rng.randint(0, T) for _ in range(6)] if maybe(rng) else None
        )
        if maybe(rng):
            beams.rewind([rng.randint(0, min(2, back)) for back in beams.cache.rewindable.tolist()])
        groups = [[0, 1, 2], [3, 4, 5]] if rng.random() < 0.8 else [range(6)]
        rows = [row for group in groups for row in rng.choices(group, k=len(group))]
        selected = beams.made(beams.cache.select(rows), rows)
        beams.reorder(rows, [rng.choice([0, 0, 1, 9]) for _ in rows])
        beams.check()
        assert beams.cache.rewindable.tolist() == selected.cache.rewindable.tolist()
    beams.feed(4)
    selected.feed(1)


@given(kind=kinds, codec=codecs, slack=slacks, residence=residences, seed=seeds)
@examples(SHARE)
def test_layout_where_the_bytes_sit_changes_nothing(
    kind: str, codec: str | None, slack: int, residence: str | int, seed: int
) -> None:
    rng = random.Random(seed)
    ids, pieces = random_ids(2, LENGTH, seed), cuts(LENGTH, rng)
    found = []
    for capacity, reserved in [(None, 0), (None, LENGTH), (LENGTH, 0), (5 * LENGTH, 0)]:
        cache, _ = new_cache(kind, 2, capacity, slack, codec=codec_for(kind, codec), residence=residence)
        found.append(run(kind, ids, cache.reserve(reserved), pieces))
        assert cache.tokens == ids.tolist()
    for other in found[1:]:
        assert_close(other, found[0], kind)


@given(
    kind=kinds,
    codec=codecs,
    capacity=capacities,
    slack=slacks,
    residence=residences,
    seed=seeds,
    value=st.sampled_from([float("nan"), float("inf")]),
)
@examples(SHARE)
def test_poison_in_unused_slots_never_reaches_an_output(
    kind: str, codec: str | None, capacity: int | None, slack: int, residence: str | int, seed: int, value: float
) -> None:
    rng = random.Random(seed)
    world = World.fresh(kind, 3, capacity, slack, seed, codec, residence)
    for _ in range(6):
        T = rng.choice([1, 1, 2, 7])
        world.cache.poison(value)
        world.feed(T, [rng.randint(0, T) for _ in range(3)], poison=False)
        world.rewind([rng.randint(0, back) for back in world.cache.rewindable.tolist()])
        world.cache.poison(value)
    world.feed(4)


@given(
    kind=kinds, codec=codecs, capacity=capacities, slack=slacks, residence=residences, seed=seeds,
    T=st.sampled_from([1, 4]), block=st.integers(0, 2), numbers=st.booleans(),
)  # fmt: skip
@examples(SHARE)
def test_atomic_a_pass_that_raises_leaves_everything_as_it_was(
    kind: str,
    codec: str | None,
    capacity: int | None,
    slack: int,
    residence: str | int,
    seed: int,
    T: int,
    block: int,
    numbers: bool,
) -> None:
    rng = random.Random(seed)
    model, world = toy(kind), World.fresh(kind, 2, capacity, slack, seed, codec, residence)
    for _ in range(4):
        world.feed(rng.choice([1, 2, 8]))
        back = world.cache.rewindable
        # What a failed pass has put somewhere may be no number at all.
        embeds = torch.full((2, T, 8), float("nan") if numbers else 1.0, dtype=torch.float64)
        with raising_after(model, block % len(model.blocks)), pytest.raises(Halfway):
            model(embeds=embeds, cache=world.cache)
        step = world.cache.step(T)
        model.forward(None, step, embeds=embeds)
        step.abort()
        step = world.cache.step(T)
        model.forward(None, step, embeds=embeds)
        step.commit(accepted=0)
        assert (world.cache.rewindable >= back.clamp(max=slack)).all()
        world.check()
        world.feed(rng.choice([1, 3]))


@given(kind=kinds, capacity=capacities, slack=slacks, residence=residences, rows=st.integers(1, 3), seed=seeds)
@examples(SHARE)
def test_file_save_then_load_goes_on_with_the_same_bits_and_can_be_taken_back_as_far(
    kind: str, capacity: int | None, slack: int, residence: str | int, rows: int, seed: int
) -> None:
    rng = random.Random(seed)
    model, saved = toy(kind), World.fresh(kind, rows, capacity, slack, seed, residence=residence)
    for _ in range(rng.randint(0, 3)):
        T = rng.choice([1, 4, 9])
        saved.feed(T, counts := [rng.randint(0, T) for _ in range(rows)], unread=rng.random() < 0.3)
        saved.feed(2, accepted=[rng.randint(0, 2) for _ in counts])
        saved.rewind([rng.randint(0, back) for back in saved.cache.rewindable.tolist()])
    loaded = saved.made(reloaded(saved.cache, pool=saved.cache.pool), range(rows))
    loaded.check()
    assert loaded.cache.rewindable.tolist() == saved.cache.rewindable.tolist()
    other = reloaded(loaded.cache, pool=saved.cache.pool)
    for _ in range(3):
        back = [rng.randint(0, most) for most in saved.cache.rewindable.tolist()]
        ids = random_ids(rows, T := rng.choice([1, 1, 3, 7]), rng.randint(0, 99))
        counts = [rng.randint(1, T) for _ in range(rows)]
        one, two = (model(ids, cache=cache.rewind(back), counts=counts) for cache in (saved.cache, other))
        assert one is not None and two is not None
        assert all(torch.equal(a[:n], b[:n]) for a, b, n in zip(one, two, counts, strict=True)), kind
    loaded.rewind([rng.randint(0, back) for back in loaded.cache.rewindable.tolist()])
    loaded.feed(rng.choice([1, 5]))
    loaded.check()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_were_taken_back_leave_no_trace_even_when_they_are_no_numbers(kind: str) -> None:
    ways = [(1, None, "device"), (3, None, "host"), (1, "k5v4", "host"), (3, "fp8", "device")]
    for stray, codec, residence in ways:
        for length in (2, 5, 6, 7, 9, 14):
            world = World.fresh(kind, 2, None, slack=3, codec=codec, residence=residence)
            world.feed(length)
            toy(kind)(embeds=torch.full((2, stray, 8), float("nan"), dtype=torch.float64), cache=world.cache)
            world.cache.rewind(stray)
            for row in world.rows:
                row.logits_known, row.floor = False, max(row.floor, length + stray - 3)
            world.check()
            world.feed(3 if length % 2 else 1)
