"""Bad input: each is a precise error, and the cache is unchanged and usable after it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from lamina import Cache, CapacityError, Codec, InputError, Model, Pool, RewindError, load_cache
from lamina.cache import Source
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
        {"ids": IDS, "spans": torch.zeros(2, 3)}, "spans must be one number per token, [2, 2], not [2, 3]",
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
    with pytest.raises(InputError, match="the source has 3 rows and is attached to 2 rows"):
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


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked", "ssd", "convolution", "hybrid", "from outside"])
@pytest.mark.parametrize("residence", ["device", "host", 3])
def test_a_capacity_binds_whatever_the_kind_of_layer(kind: str, residence: str | int) -> None:
    world = World.fresh(kind, 2, capacity=9, residence=residence)
    assert world.cache.limit == 9
    world.feed(9, [9, 7])
    with refused_without_room(world, "row 0 holds 9 tokens and 1 more were given, but the capacity is 9."):
        world.model([[1], [1]], cache=world.cache)
    with refused_without_room(world, "cannot reserve 10 tokens: the capacity is 9; make a larger cache"):
        world.cache.reserve(10)
    world.feed(2, [0, 2])
    world.feed(1, [0, 0])
    world.check()


# -- steps ---------------------------------------------------------------------------------------------------------

BAD_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"T": 0}, "a pass needs at least one token per row, not 0"),
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


OVER = "this step is closed: it was committed or aborted, or the cache was changed after it was opened"


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


@pytest.mark.parametrize("kind", ["full", "sliding", "ssd", "convolution", "hybrid", "latent", "tokens", "cross"])
@pytest.mark.parametrize("T", [1, 3])
def test_a_step_in_which_the_model_did_not_run_cannot_be_committed(kind: str, T: int) -> None:
    world = World.fresh(kind, 2, slack=1)
    world.feed(4, [4, 2])
    step = world.cache.step(T)
    with pytest.raises(InputError, match=r"^this step cannot be committed: nothing was written in layer 0 \("):
        step.commit()
    with pytest.raises(
        InputError, match=r"Run model.forward\(ids, step\) first, or drop the step with step.abort\(\)$"
    ):
        step.commit(0)
    world.check()
    ids = random_ids(2, T)
    world.model.forward(ids, step)  # it is still open
    step.commit()
    assert world.cache.lengths.tolist() == [4 + T, 2 + T]


def test_a_step_in_which_some_layers_did_not_run_cannot_be_committed() -> None:
    world = World.fresh("sliding and full", 1)
    step, x = world.cache.step(1), torch.zeros(1, 1, WIDTH, dtype=torch.float64)
    shared = world.model.prepare(step.positions)
    x = world.model.blocks[0](x, step.memory(0), shared)
    with pytest.raises(InputError, match=r"nothing was written in layer 1 \('attention'\), 2 \('attention'\)\. Run"):
        step.commit()
    for i in (1, 2):
        x = world.model.blocks[i](x, step.memory(i), shared)
    step.commit()  # block after block is a way to run a model, too
    assert world.cache.lengths.tolist() == [1]


# -- verbs ---------------------------------------------------------------------------------------------------------


def test_rewinding_more_than_was_written(world: World) -> None:
    with refused(world, RewindError, "row 1 holds 5 tokens and cannot be rewound by 6"):
        world.cache.rewind([0, 6])


def test_rewinding_more_than_the_slack_says_what_is_kept_and_how_to_keep_more(world: World) -> None:
    text = (
        "row 0 cannot be rewound by 3: of its 9 tokens, sliding windows and recurrent states can be rewound by 2 (the "
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
    with refused(world, InputError, "repeat needs a count for each of the 2 rows, with a sum of at least 1, not 0"):
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


# -- numbers and things of the wrong kind --------------------------------------------------------------------------

RAGGED = torch.tensor([[1, 1], [1, 1]])
WRONG_KIND: dict[str, tuple[Callable[[Any], object], str]] = {
    "rewind by half a token": (lambda c: c.rewind([1.5, 0]), "rewind=1.5: it must be a whole number"),
    "rewind by a whole float": (lambda c: c.rewind(1.0), "rewind=1.0: it must be a whole number"),
    "rewind by a truth": (lambda c: c.rewind(True), "rewind=True: it must be a whole number"),
    "rewind by a word": (lambda c: c.rewind("11"), "rewind='11': it must be whole numbers, in a list or a tensor"),
    "rewind by None": (lambda c: c.rewind(None), "rewind=None: it must be a whole number"),
    "rewind by floats": (lambda c: c.rewind(torch.ones(2)), "rewind must be whole numbers, not torch.float32"),
    "rewind by a mask": (
        lambda c: c.rewind(torch.tensor([True, False])), "rewind must be whole numbers, not torch.bool",
    ),
    "rewind by a matrix": (lambda c: c.rewind(RAGGED), "rewind must have one axis, not shape (2, 2)"),
    "reset a word": (lambda c: c.reset("a"), "rows='a': it must be whole numbers, in a list or a tensor"),
    "reset a row that is not there": (lambda c: c.reset([99]), "there is no row 99: the cache has rows 0 to 1"),
    "reset a longer mask": (
        lambda c: c.reset(torch.ones(3) > 0), "rows is a mask of shape (3,): it must be one of the 2 rows",
    ),
    "select a word": (lambda c: c.select("a"), "rows='a': it must be whole numbers, in a list or a tensor"),
    "select half a row": (lambda c: c.select([0.5]), "rows=0.5: it must be a whole number"),
    "select truths": (lambda c: c.select([True, False]), "rows=True: it must be a whole number"),
    "select None": (lambda c: c.select(None), "rows=None: it must be a whole number"),
    "reorder by words": (lambda c: c.reorder(["a", "b"]), "rows='a': it must be a whole number"),
    "reorder too few": (
        lambda c: c.reorder([0]), "reorder needs one source row for each of the 2 rows, not 1: [0]",
    ),
    "reorder since a word": (
        lambda c: c.reorder([1, 0], "a"), "since='a': it must be whole numbers, in a list or a tensor",
    ),
    "reorder since half": (lambda c: c.reorder([1, 0], 0.5), "since=0.5: it must be a whole number"),
    "repeat a negative number of times": (lambda c: c.repeat(-1), "repeat of row 0 is -1; it must be at least 0"),
    "repeat half a time": (lambda c: c.repeat(0.5), "repeat=0.5: it must be a whole number"),
    "repeat some": (lambda c: c.repeat([1]), "repeat must have one number for each of the 2 rows, not 1: [1]"),
    "reserve a word": (lambda c: c.reserve("x"), "n='x': it must be a whole number"),
    "reserve less than nothing": (lambda c: c.reserve(-1), "cannot reserve -1 tokens: give 0 or more"),
    "a step of half a token": (lambda c: c.step(0.5), "T=0.5: it must be a whole number"),
    "a step of a word": (lambda c: c.step("2"), "T='2': it must be a whole number"),
    "a step of no tokens": (lambda c: c.step(0), "a pass needs at least one token per row, not 0"),
    "a step with words for counts": (lambda c: c.step(2, ["a", "b"]), "counts='a': it must be a whole number"),
    "a step with half counts": (lambda c: c.step(2, [0.5, 1]), "counts=0.5: it must be a whole number"),
    "a step with a word for rows": (
        lambda c: c.step(2, rows="a"), "rows='a': it must be whole numbers, in a list or a tensor",
    ),
    "a step with spans of nothing": (lambda c: c.step(2, spans=5), "spans must be one number per token, [2, 2], not 5"),
    "attach a number": (lambda c: c.attach(5), "source=5: it must be a Source, which model.encode(ids) makes"),
    "join a cache": (lambda c: Cache.join(5), "join needs a list of caches, not 5"),
    "join with room for a word": (lambda c: Cache.join([c], "x"), "room='x': it must be a whole number"),
    "join with less than no room": (lambda c: Cache.join([c], -1), "room=-1: it must be 0 or more"),
    "save to a number": (lambda c: c.save(5), "path=5: it must be the path of a file"),
    "save in unknown states": (
        lambda c: c.save("x", states=5),
        "states=5: there is no such dtype of states; the nearest is 'float32'. States may be rounded to bfloat16, "
        "float16, float32; None keeps them exact",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_KIND)
def test_what_is_no_number_is_refused_by_its_name(world: World, what: str) -> None:
    verb, text = WRONG_KIND[what]
    with refused(world, InputError, text):
        verb(world.cache)


def test_accepted_numbers_of_the_wrong_kind_can_be_corrected(world: World) -> None:
    step = world.cache.step(2)
    world.model.forward(IDS, step)
    for bad in ([0.5, 1], "ab", [True, 1], torch.ones(2)):
        with pytest.raises(InputError, match="accepted"):
            step.commit(bad)  # type: ignore[arg-type]
    step.commit([1, 0])
    assert [len(row) for row in world.cache.tokens] == [10, 5]


def test_whole_numbers_of_other_libraries_are_numbers(world: World) -> None:
    cache = world.cache.select(np.array([1, 0]))  # type: ignore[arg-type]
    assert [len(row) for row in cache.rewind(torch.tensor(1)).tokens] == [4, 8]
    assert [len(row) for row in cache.rewind([np.int64(1), 0]).tokens] == [3, 8]  # type: ignore[list-item]
    assert cache.select(torch.tensor([False, True])).rows == 1
    assert toy("full").new_cache(np.int64(2)).rows == 2  # type: ignore[arg-type]


NEW: dict[str, tuple[dict[str, Any], str]] = {
    "a word for rows": ({"rows": "2"}, "rows='2': it must be a whole number"),
    "no rows": ({"rows": 0}, "a cache needs at least one row, not 0"),
    "fewer than no rows": ({"rows": -1}, "a cache needs at least one row, not -1"),
    "a truth for rows": ({"rows": True}, "rows=True: it must be a whole number"),
    "half a row": ({"rows": 1.5}, "rows=1.5: it must be a whole number"),
    "a word for the capacity": ({"capacity": "x"}, "capacity='x': it must be a whole number"),
    "a word for the slack": ({"slack": "x"}, "slack='x': it must be a whole number"),
    "a residence that is misspelt": ({"residence": "hots"}, "there is no residence 'hots'; the nearest is 'host'."),
    "a number for the residence": ({"residence": 5}, "there is no residence 5;"),
    "a list for the residence": ({"residence": ["host"]}, "there is no residence ['host'];"),
    "an unknown codec": ({"codec": "int7"}, "there is no codec 'int7'; the nearest is 'int"),
    "a number for the codec": ({"codec": 5}, "there is no codec 5;"),
    "a list for the codec": ({"codec": ["int8"]}, "there is no codec ['int8'];"),
    "a codec for no layer": ({"codec": {"a": "int8"}}, "codec names layer 'a': layers are 0 to 1"),
    "a codec for a truth": ({"codec": {True: "int8"}}, "codec names layer True: layers are 0 to 1"),
    "a number for the source": ({"source": 5}, "source=5: it must be a Source, which model.encode(ids) makes"),
    "a number for the pool": ({"pool": 5}, "pool=5: it must be a lamina.Pool"),
}


@pytest.mark.parametrize("what", NEW)
def test_what_a_new_cache_cannot_be_made_of_is_named(what: str) -> None:
    given, text = NEW[what]
    with pytest.raises(InputError, match=f"^{re.escape(text)}"):
        toy("full").new_cache(**given)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Pool(5), "model=5: a pool is made for a model, as lamina.load returns one"),  # type: ignore[arg-type]
        (lambda: Pool(toy("full"), tokens="x"), "tokens='x': it must be a whole number"),  # type: ignore[arg-type]
        (lambda: Pool(toy("full"), tokens=2.5), "tokens=2.5: it must be a whole number"),  # type: ignore[arg-type]
        (lambda: Pool(toy("full"), tokens=True), "tokens=True: it must be a whole number"),
        (lambda: Pool(toy("full"), tokens=8, rows="x"), "rows='x': it must be a whole number"),  # type: ignore[arg-type]
        (lambda: Pool(toy("full"), page=None), "page=None: it must be a whole number"),  # type: ignore[arg-type]
        (lambda: Pool(toy("full"), page=0), "page=0: it must be at least 1"),
        (lambda: Pool(toy("full"), slack=-1), "slack must be 0 or more, not -1"),
        (lambda: Pool(toy("full"), slack="x"), "slack='x': it must be a whole number"),  # type: ignore[arg-type]
        (lambda: Pool(toy("full"), codec="int7"), "there is no codec 'int7'; the nearest is 'int"),
        (
            lambda: Codec(keys=8.0),  # type: ignore[arg-type]
            "keys=8.0: there is no such format; the nearest is 8. Formats are 8, 6, 5, 4, 'fp8', 'plain'",
        ),
        (
            lambda: Codec(values=[8]),  # type: ignore[arg-type]
            "values=[8]: there is no such format; the nearest is 8. Formats are 8, 6, 5, 4, 'fp8', 'plain'",
        ),
        (
            lambda: Source(torch.zeros(2, 3), torch.ones(2, dtype=torch.int64)),
            "states of a source is [2, 3]: states are floats [B, S, width], lengths whole numbers [B]",
        ),
        (
            lambda: Source(torch.zeros(2, 3, 4), [1, 2]),  # type: ignore[arg-type]
            "lengths of a source is [1, 2]: states are floats [B, S, width], lengths whole numbers [B]",
        ),
        (
            lambda: Source(torch.zeros(2, 3, 4), torch.ones(1, dtype=torch.int64)),
            "a source has states of 2 rows and lengths of 1",
        ),
        (lambda: toy("cross").encode([[1]]).select([0.5]), "rows=0.5: it must be a whole number"),
        (lambda: toy("cross").encode([[1]]).select([1]), "there is no row 1: the cache has rows 0 to 0"),
        (
            lambda: load_cache("x", 5),  # type: ignore[arg-type]
            "model=5: a file is loaded for the model that saved it, as lamina.load returns it",
        ),
        (lambda: load_cache(5, toy("full")), "path=5: it must be the path of a file"),  # type: ignore[arg-type]
        (lambda: load_cache("x", toy("full"), pool=5), "pool=5: it must be a lamina.Pool"),  # type: ignore[arg-type]
    ],
)
def test_what_a_pool_a_codec_a_source_or_a_file_cannot_be_made_of_is_named(
    make: Callable[[], object], text: str
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(text)}"):
        make()


# -- memory --------------------------------------------------------------------------------------------------------


def test_model_code_that_asks_its_memory_for_something_else_is_told_what_there_is() -> None:
    memory = toy("hybrid").new_cache().step(1).memory(0)
    q = torch.zeros(1, 4, 1, 4)
    with pytest.raises(InputError, match="layer 0 entry 'attention' stores its own keys and values"):
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
    with pytest.raises(InputError, match="Model does not say how ids are embedded"):
        Model().embed(IDS)
    with pytest.raises(InputError, match="Model does not say how logits are made"):
        Model().unembed(torch.zeros(1))
    assert issubclass(Toy, Model)


def test_counts_are_checked_beside_ids_that_are_all_known() -> None:
    model = toy("full")
    model.check_ids(IDS, [2, 1])
    for counts in ([3], [9, 9], [-1, 2], [1.5, 2]):
        with pytest.raises(InputError):
            model.check_ids(IDS, counts)
