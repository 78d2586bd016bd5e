"""Bad input: each is a precise error, and the cache is unchanged and usable after it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lamina import Cache, CapacityError, InputError, Model, RewindError
from tests.laws.toys import SCAN, WIDTH, Attend, EncoderDecoder, LearnedPositions, Toy, random_ids, toy
from tests.laws.world import World


@contextmanager
def refused(world: World, error: type[Exception], text: str) -> Iterator[None]:
    """The block raises this very text, and the cache goes on as if nothing had been asked."""
    back = world.cache.rewindable.tolist()
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        yield
    world.check()
    assert world.cache.rewindable.tolist() == back
    world.feed(1, accepted=[0] * len(world.rows))
    world.feed(1)


@pytest.fixture
def world() -> World:
    world = World.fresh("sliding and full", 2, capacity=20, slack=2)
    world.feed(9, [9, 5])
    return world


IDS = torch.tensor([[1, 2], [3, 4]])

BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "an id that is too large": (
        {"ids": [[1, 2], [3, 13]]}, "id 13 at row 1, token 1 is not in the vocabulary: ids go from 0 to 12",
    ),
    "a negative id": (
        {"ids": [[-1, 2], [3, 4]]}, "id -1 at row 0, token 0 is not in the vocabulary: ids go from 0 to 12",
    ),
    "an empty prompt": ({"ids": [[], []]}, "ids must be [B, T] with at least one token, not [2, 0]"),
    "no rows": (
        {"ids": torch.zeros(0, 3, dtype=torch.int64)}, "ids must be [B, T] with at least one token, not [0, 3]",
    ),
    "a flat list of ids": ({"ids": [1, 2]}, "ids must be [B, T] with at least one token, not [2]"),
    "ids that are no whole numbers": ({"ids": [[1.0], [2.0]]}, "ids must be whole numbers, not torch.float32"),
    "neither ids nor embeddings": ({}, "give either ids or embeds"),
    "ids and embeddings": ({"ids": IDS, "embeds": torch.zeros(2, 2, WIDTH)}, "give either ids or embeds"),
    "flat embeddings": (
        {"embeds": torch.zeros(2, WIDTH)}, "embeds must be [B, T, width] with at least one token, not [2, 8]",
    ),
    "more real tokens than there are": (
        {"ids": IDS, "counts": [2, 3]}, "counts of row 1 is 3; it must be between 0 and 2",
    ),
    "a negative count": ({"ids": IDS, "counts": [-1, 2]}, "counts of row 0 is -1; it must be between 0 and 2"),
    "counts for other rows": (
        {"ids": IDS, "counts": [1]}, "counts must have one number for each of the 2 rows, not 1: [1]",
    ),
    "other rows": ({"ids": [[1], [2], [3]]}, "3 rows were given, the cache has 2"),
    "unknown logits": ({"ids": IDS, "logits": "first"}, 'logits=\'first\': it must be "all", "last" or None'),
    "segments": (
        {"ids": IDS, "segments": torch.zeros(2, 2)},
        "packed segments run without a cache; with one, give each sequence a row of its own",
    ),
    "spans of another shape": (
        {"ids": IDS, "spans": torch.zeros(2, 3)}, "spans must be one number a token, [2, 2], not [2, 3]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_CALLS)
def test_a_call_that_cannot_be_done_says_why(world: World, what: str) -> None:
    given, text = BAD_CALLS[what]
    with refused(world, InputError, text):
        world.model(**given, cache=world.cache)


def test_padding_may_hold_any_id(world: World) -> None:
    world.model([[1, 99], [-7, -7]], cache=world.cache, counts=[1, 0])
    assert [len(row) for row in world.cache.tokens] == [10, 5]


def test_a_cache_of_another_model_is_refused(world: World) -> None:
    with refused(world, InputError, "this cache was made by another model; make one with this model's new_cache()"):
        toy("full")(IDS, cache=world.cache)


def test_a_source_is_given_to_the_cache_and_only_where_one_is_read(world: World) -> None:
    source = toy("cross").encode([[1, 2]])
    with refused(world, InputError, "a cache holds its source: give it to new_cache(source=…) or cache.attach(source)"):
        world.model(IDS, cache=world.cache, source=source)
    with refused(world, InputError, "this model reads no source: only encoder–decoder models do"):
        world.cache.attach(source)
    with pytest.raises(InputError, match="Toy reads no source: only encoder–decoder models do"):
        world.model.encode([[1]])


def test_a_row_without_its_source_cannot_run() -> None:
    world = World.fresh("cross", 2)
    world.feed(3)
    world.cache.reset([1])
    message = (
        "this model reads a source, and row 1 has none: make one with model.encode(ids) and give it to "
        "model.new_cache(rows, source=source) or cache.attach(source, rows=[1])"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        world.model([[1], [1]], cache=world.cache)
    model = world.model
    assert isinstance(model, EncoderDecoder)
    with pytest.raises(InputError, match="the source has 3 rows, the cache takes it for 2"):
        world.cache.attach(model.encode([[1], [2], [3]]))
    with pytest.raises(InputError, match="this model reads a source, and none is attached"):
        model([[1]])


# -- room ----------------------------------------------------------------------------------------------------------

FULL = (
    "row 0 holds 9 tokens and 12 more were given, but the capacity is 20. Make the cache with a larger capacity (or "
    "None, which grows), or take the row back with cache.rewind or cache.reset."
)


def test_capacity_exceeded(world: World) -> None:
    with refused(world, CapacityError, FULL):
        world.model(random_ids(2, 12), cache=world.cache)


def test_a_row_may_be_filled_to_the_last_slot(world: World) -> None:
    world.feed(11)
    with refused_without_room(world, "row 0 holds 20 tokens and 1 more were given, but the capacity is 20."):
        world.model([[1], [1]], cache=world.cache)
    world.feed(4, [0, 4])
    world.cache.reset([0])


@contextmanager
def refused_without_room(world: World, text: str) -> Iterator[None]:
    with pytest.raises(CapacityError, match=re.escape(text)):
        yield
    world.check()


def test_reserving_more_than_the_capacity(world: World) -> None:
    with refused(world, CapacityError, "cannot reserve 21 tokens: the capacity is 20; make a larger cache"):
        world.cache.reserve(21)


def test_positions_of_a_table_are_a_capacity_too() -> None:
    model = LearnedPositions(Attend())
    ids = random_ids(2, 10)
    whole = model(ids)
    assert whole is not None
    cache = model.new_cache(rows=2)
    assert cache.limit == 10
    assert model.new_cache(capacity=4).limit == 4
    model(ids, cache=cache, counts=[9, 4])
    text = (
        "row 0 holds 9 tokens and 2 more were given, but the model has positions for 10. Use a shorter prompt, or take "
        "the row back with cache.rewind or cache.reset."
    )
    with pytest.raises(CapacityError, match=f"^{re.escape(text)}$"):
        model(ids[:, :2], cache=cache)
    assert cache.lengths.tolist() == [9, 4]
    # The other row may fill up while this one only holds padding, whose positions are past the table.
    rest = torch.stack([ids[0].roll(-9), ids[1].roll(-4)])[:, :6]
    found = model(rest, cache=cache, counts=[1, 6])
    assert found is not None
    torch.testing.assert_close(found[0, 0], whole[0, 9])
    torch.testing.assert_close(found[1], whole[1, 4:])
    model(rest, cache=cache, counts=[0, 0])
    assert cache.tokens == ids.tolist()
    with pytest.raises(CapacityError, match=r"^11 tokens were given, but the model has positions for 10\."):
        model(random_ids(1, 11))
    model(random_ids(1, 11), counts=[10])


# -- steps ---------------------------------------------------------------------------------------------------------

BAD_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"T": 0}, "a pass needs at least one token a row, not 0"),
    "no rows": ({"T": 1, "rows": []}, "a pass needs at least one row"),
    "a row that is not there": ({"T": 1, "rows": [0, 2]}, "there is no row 2: the cache has rows 0 to 1"),
    "a row twice": (
        {"T": 1, "rows": [1, 1]}, "rows [1, 1] name a row twice; repeat the row with cache.select to run it twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_STEPS)
def test_a_step_that_cannot_be_opened_says_why(world: World, what: str) -> None:
    given, text = BAD_STEPS[what]
    with refused(world, InputError, text):
        world.cache.step(**given)


OVER = "this step is over: it was committed or aborted, or the cache was changed after it was opened"


def test_accepting_more_than_was_given_can_be_corrected(world: World) -> None:
    step = world.cache.step(2, counts=[2, 1])
    world.model.forward(IDS, step)
    for bad, text in [
        ([3, 1], "row 0 is 3; it must be between 0 and 2"),
        ([1, 2], "row 1 is 2"),
        ([-1, 0], "row 0 is -1"),
    ]:
        with pytest.raises(InputError, match=f"accepted of {text}"):
            step.commit(bad)
    world.check()
    step.commit([1, 1])
    assert [row[-1] for row in world.cache.tokens] == [1, 3]


CHANGES: dict[str, Callable[[Cache], object]] = {
    "rewound": lambda cache: cache.rewind(1),
    "reset": lambda cache: cache.reset([0]),
    "given another step": lambda cache: cache.step(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_is_over_when_the_cache_was(world: World, change: str) -> None:
    step = world.cache.step(2)
    world.model.forward(IDS, step)
    CHANGES[change](world.cache)
    before = world.cache.tokens
    with pytest.raises(InputError, match=OVER):
        step.commit()
    assert world.cache.tokens == before


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_step_ends_once(world: World, end: str) -> None:
    step = world.cache.step(2)
    world.model.forward(IDS, step)
    getattr(step, end)()
    with pytest.raises(InputError, match=OVER):
        step.commit()


# -- verbs ---------------------------------------------------------------------------------------------------------


def test_rewinding_more_than_was_written(world: World) -> None:
    with refused(world, RewindError, "row 1 holds 5 tokens and cannot be taken back by 6"):
        world.cache.rewind([0, 6])


def test_rewinding_more_than_the_slack_says_what_is_kept_and_how_to_keep_more(world: World) -> None:
    text = (
        "row 0 cannot be taken back by 3: of its 9 tokens, sliding windows and recurrent states can go back 2 (the "
        "cache's slack is 2). Make the cache with slack=3 or more, fork it before the tokens to be dropped, or reset "
        "the row."
    )
    with refused(world, RewindError, text):
        world.cache.rewind(3)


def test_bad_numbers_for_verbs(world: World) -> None:
    cache = world.cache
    with refused(world, InputError, "rewind of row 1 is -1; it must be at least 0"):
        cache.rewind([0, -1])
    with refused(world, InputError, "rewind must have one number for each of the 2 rows, not 3: [0, 0, 0]"):
        cache.rewind([0, 0, 0])
    with refused(world, InputError, "there is no row 5: the cache has rows 0 to 1"):
        cache.reset([5])
    with refused(world, InputError, "there is no row -1: the cache has rows 0 to 1"):
        cache.select([-1])
    with refused(world, InputError, "select needs at least one row"):
        cache.select([])
    with refused(world, InputError, "repeat needs how often for each of the 2 rows, at least 1 in all, not 0"):
        cache.repeat(0)
    with refused(world, InputError, "join needs at least one cache"):
        Cache.join([])


def test_only_caches_of_the_same_model_and_kind_of_store_can_be_joined(world: World) -> None:
    with refused(world, InputError, "only caches of the same model can be joined"):
        Cache.join([world.cache, toy("full").new_cache(capacity=20)])
    text = "a growing cache and one of fixed capacity 20 cannot be joined: make both with a capacity, or both without"
    with refused(world, InputError, text):
        Cache.join([world.cache, world.model.new_cache()])
    other = Cache(world.model.specs, capacity=20, dtype=torch.float32, model=world.model)
    with refused(world, InputError, "caches in torch.float64 on cpu and in torch.float32 on cpu cannot be joined"):
        Cache.join([world.cache, other])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rows": 0}, "a cache needs at least one row, not 0"),
        ({"capacity": 0}, "capacity must be at least 1, not 0; None lets the cache grow"),
        ({"slack": -1}, "slack must be 0 or more, not -1"),
    ],
)
def test_caches_that_cannot_be_made(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(text)}$"):
        toy("full").new_cache(**given)


# -- memory --------------------------------------------------------------------------------------------------------


def test_model_code_that_asks_its_memory_for_something_else_is_told_what_there_is() -> None:
    memory = toy("hybrid").new_cache().step(1).memory(0)
    q = torch.zeros(1, 4, 1, 4)
    with pytest.raises(InputError, match="layer 0 entry 'attention' keeps its own keys and values"):
        memory.attend(q, scale=1.0)
    with pytest.raises(
        InputError, match=r"layer 0 remembers \['attention', 'convolution', 'state'\], nothing called 'x'"
    ):
        memory["x"]
    with pytest.raises(InputError, match=r"layer 0 has 0 entries for recall \[\]: give name="):
        memory.recall(torch.zeros(1, 1, 8))
    with pytest.raises(InputError, match=r"layer 0 entry 'state' keeps the state of SSD.*, not of SelectiveScan"):
        memory.recur(SCAN, {}, {})


def test_a_shared_layer_needs_its_source_before_it() -> None:
    step = toy("shared").new_cache().step(1)
    with pytest.raises(
        InputError, match="layer 2 shares layer 0 entry 'attention', which has not attended in this pass"
    ):
        step.memory(2).attend(torch.zeros(1, 4, 1, 4), scale=1.0)


def test_a_model_that_says_nothing_is_told_what_is_missing() -> None:
    with pytest.raises(TypeError, match="Model does not say how ids are embedded"):
        Model().embed(IDS)
    with pytest.raises(TypeError, match="Model does not say how logits are made"):
        Model().unembed(torch.zeros(1))
    assert issubclass(Toy, Model)
