"""What a cache says about itself, its verbs, and how it grows."""

from __future__ import annotations

import pytest
import torch

from lamina import Cache
from lamina.attention.window import Full, Sliding
from lamina.cache import Tokens
from lamina.cache.summary import size
from tests.laws.toys import KINDS, assert_close, random_ids, toy, truth
from tests.laws.world import World

# -- facts ---------------------------------------------------------------------------------------------------------


def test_a_new_cache_holds_nothing() -> None:
    cache = toy("hybrid").new_cache(rows=3, slack=2)
    assert (cache.rows, cache.lengths.tolist(), cache.tokens) == (3, [0, 0, 0], [[], [], []])
    assert cache.rewindable.tolist() == [0, 0, 0]
    assert cache.logits is None


def test_tokens_and_lengths_follow_every_pass_and_verb() -> None:
    model = toy("sliding")
    cache = model.new_cache(rows=2, slack=3)
    model([[1, 2, 3], [4, 5, 0]], cache=cache, counts=[3, 2])
    assert cache.tokens == [[1, 2, 3], [4, 5]]
    model([[6], [7]], cache=cache)
    assert cache.tokens == [[1, 2, 3, 6], [4, 5, 7]]
    assert cache.rewind([2, 0]).tokens == [[1, 2], [4, 5, 7]]
    assert cache.select([1, 0, 1]).tokens == [[4, 5, 7], [1, 2], [4, 5, 7]]
    assert cache.repeat(2).tokens == [[1, 2], [1, 2], [4, 5, 7], [4, 5, 7]]
    assert [part.tokens for part in cache.split()] == [[[1, 2]], [[4, 5, 7]]]
    assert Cache.join([cache, cache.select([1])]).tokens == [[1, 2], [4, 5, 7], [4, 5, 7]]
    assert cache.reset([0]).tokens == [[], [4, 5, 7]]
    assert cache.reset().tokens == [[], []]


def test_tokens_are_minus_one_where_embeddings_were_fed() -> None:
    model = toy("full")
    cache = model.new_cache()
    model([[3]], cache=cache)
    model(embeds=torch.zeros(1, 2, 8), cache=cache)
    model([[5]], cache=cache)
    assert cache.tokens == [[3, -1, -1, 5]]


def test_the_last_logits_are_kept_and_are_not_known_after_a_rewind_or_a_pass_without_logits() -> None:
    model = toy("full")
    cache = model.new_cache(rows=2)
    found = model([[1, 2, 3], [4, 0, 0]], cache=cache, counts=[3, 1])
    assert found is not None and cache.logits is not None
    assert_close(cache.logits, torch.stack([found[0, 2], found[1, 0]]))
    last = model([[5, 6], [7, 0]], cache=cache, counts=[2, 0], logits="last")
    assert last is not None
    assert_close(cache.logits, torch.stack([last[0], found[1, 0]]))
    cache.rewind([1, 0])
    assert cache.logits[0].isnan().all()
    assert_close(cache.logits[1], found[1, 0])
    model([[5], [0]], cache=cache, counts=[0, 1], logits=None)
    assert cache.logits.isnan().all()


def test_rewindable_numbers() -> None:
    def how_far(kind: str, slack: int, *lengths: int) -> list[int]:
        cache = toy(kind).new_cache(slack=slack)
        numbers = []
        for n in lengths:
            toy(kind)(random_ids(1, n), cache=cache)
            numbers.append(int(cache.rewindable))
        return numbers

    assert how_far("full", 0, 1, 30, 1) == [1, 31, 32]
    assert how_far("sliding", 0, 3, 1, 1, 1) == [3, 4, 0, 0]  # windows of 4: nothing is lost before the fifth token
    assert how_far("sliding", 2, 6, 1, 9) == [6, 2, 2]
    assert how_far("sliding, keep", 0, 6, 1, 1) == [6, 0, 0]  # 4 after 2 kept ones, and 3 after 5
    assert how_far("selective scan", 0, 1, 5) == [0, 0]
    assert how_far("selective scan", 2, 4, 1, 1, 9) == [4, 2, 3, 2]  # between the slack and twice as much
    assert how_far("nothing to remember", 0, 7) == [7]


def test_what_was_rewound_counts_against_the_slack_until_new_tokens_come() -> None:
    model = toy("sliding")
    cache = model.new_cache(slack=3)
    model(random_ids(1, 20), cache=cache)
    assert int(cache.rewindable) == 3
    assert int(cache.rewind(2).rewindable) == 2  # one slot more than the slack is there while nothing is under way
    assert int(cache.rewind(2).rewindable) == 0
    model(random_ids(1, 1), cache=cache)
    assert int(cache.rewindable) == 1
    model(random_ids(1, 4), cache=cache)
    assert int(cache.rewindable) == 3


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_what_a_cache_tells_is_a_copy_that_may_be_changed(kind: str) -> None:
    world = World.fresh(kind, 2, slack=2)
    world.feed(5, [5, 3])
    cache = world.cache
    cache.lengths.add_(5)
    lengths = cache.lengths
    lengths += 5
    cache.rewindable.zero_()
    assert cache.logits is not None
    cache.logits.zero_()
    cache.tokens[0].append(7)
    world.check()
    before, kept = cache.lengths, cache.logits
    world.feed(1)
    assert before.tolist() == [5, 3], "what was told stays what it was"
    assert_close(kept[0], truth(kind, tuple(world.rows[0].ids))[4])


def test_the_limit_is_the_capacity_whatever_the_kinds_of_layers() -> None:
    assert toy("full").new_cache().limit is None
    assert toy("full").new_cache(capacity=9).limit == 9
    assert toy("sliding").new_cache(capacity=9).limit == 9
    assert toy("sliding").new_cache(capacity=3).limit == 3
    assert toy("sliding").new_cache(capacity=5, slack=2).limit == 5
    assert toy("sliding and full").new_cache(capacity=50).limit == 50
    assert toy("ssd").new_cache(capacity=9).limit == 9
    assert toy("ssd").new_cache().limit is toy("sliding").new_cache().limit is None


def test_nbytes_counts_every_tensor_of_every_layer() -> None:
    # Two layers of keys and values: 2 rows, 2 heads, 16 slots, 4 numbers of 8 bytes.
    assert toy("full").new_cache(rows=2, capacity=16).nbytes == 2 * 2 * (2 * 2 * 16 * 4 * 8)
    assert toy("sliding").new_cache(rows=2, capacity=16, slack=1).nbytes == 2 * 2 * (2 * 2 * 5 * 4 * 8)
    assert toy("selective scan").new_cache(rows=3).nbytes == 2 * 3 * (4 * 3 * 8)
    assert toy("nothing to remember").new_cache().nbytes == 0


def test_slack_costs_a_recurrent_layer_two_states_and_twice_the_slack_in_inputs() -> None:
    inputs = 4 + 4 + 3 + 3
    for slack in (1, 8):
        cache = toy("selective scan").new_cache(slack=slack)
        assert cache.nbytes == 2 * 8 * (2 * 4 * 3 + 2 * slack * inputs)


def test_a_cache_prints_as_a_table() -> None:
    model = toy("hybrid")
    cache = model.new_cache(rows=2, capacity=64, slack=1)
    model([[1, 2], [3, 4]], cache=cache, counts=[2, 1])
    assert str(cache).splitlines() == [
        "Cache of 2 rows, capacity 64, slack 1, lengths [2, 1]",
        "kind                  layers  slots  dtype      bytes",
        "--------------------  ------  -----  -------  -------",
        "attention, sliding 5       2      6  float64  3.0 KiB",
        "convolution 3              2      4  float64  1.0 KiB",
        "SSD                        2         float64  1.5 KiB",
        "token ids                         2  int64       32 B",
        "logits                               float64    208 B",
        "clock                                int64       49 B",
        "all                        2                  5.8 KiB",
    ]


def test_a_table_names_every_kind() -> None:
    words = {
        "full": "attention ", "sliding": "attention, sliding 4", "sliding, keep": "attention, sliding 4 + first 2",
        "chunked": "attention, chunks of 4", "latent": "latent", "convolution": "convolution 4",
        "selective scan": "SelectiveScan", "ssd": "SSD", "gated delta": "GatedDelta", "cross": "cross",
        "shared": "shared", "tokens": "tokens, sliding 4", "from outside": "peak", "nothing to remember": "all",
    }  # fmt: skip
    for kind, word in words.items():
        assert word in str(toy(kind).new_cache()), kind
    assert "grows" in str(toy("full").new_cache())


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**43, "8192.0 GiB")]
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


# -- verbs ---------------------------------------------------------------------------------------------------------


def test_verbs_in_place_return_the_cache_and_the_others_a_new_one() -> None:
    cache = toy("full").new_cache(rows=2)
    assert cache.rewind(0) is cache
    assert cache.reset() is cache
    assert cache.reserve(5) is cache
    assert cache.poison() is cache
    assert cache.fork() is not cache
    assert Cache.join([cache]) is not cache


@pytest.mark.parametrize("kind", KINDS)
def test_new_caches_share_no_memory_with_their_parents(kind: str) -> None:
    world = World.fresh(kind, 2, slack=2)
    world.feed(3)
    for child in (world.cache.fork(), world.cache.select([0, 1]), Cache.join([world.cache]), *world.cache.split()):
        for entry, theirs in zip(world.cache.layers, child.layers, strict=True):
            for name, layer in entry.items():
                ours = {tensor.data_ptr() for tensor in layer.data.values() if tensor.numel()}
                assert ours.isdisjoint(t.data_ptr() for t in theirs[name].data.values() if t.numel())


def test_rows_may_be_a_number_a_list_a_tensor_or_a_mask() -> None:
    model = toy("full")
    cache = model.new_cache(rows=3)
    model([[1], [2], [3]], cache=cache)
    for rows in ([2], torch.tensor([2]), torch.tensor([False, False, True])):
        assert cache.select(rows).tokens == [[3]]
    assert cache.repeat([0, 2, 1]).tokens == [[2], [2], [3]]
    cache.rewind(torch.tensor([0, 1, 0]))
    assert cache.lengths.tolist() == [1, 0, 1]


@pytest.mark.parametrize("kind", ["sliding and full", "latent", "wide heads"])
def test_a_join_has_the_room_that_is_asked_for_and_goes_on_in_it(kind: str) -> None:
    worlds = [World.fresh(kind, 1, slack=2) for _ in range(2)]
    for tokens, world in zip((40, 5), worlds, strict=True):
        world.feed(tokens)
    joined = Cache.join([world.cache for world in worlds], room=90)
    assert joined.tokens == [world.cache.tokens[0] for world in worlds]
    where = {
        t.data_ptr() for layer in joined.every_layer() if getattr(layer, "in_line", False) for t in layer.data.values()
    }
    assert where
    model = toy(kind)
    for row, ids in enumerate(joined.tokens):
        assert_close(model([[3]], cache=joined.select([row]))[0, -1], truth(kind, (*ids, 3))[-1])
    model(random_ids(2, 50, 0), cache=joined)
    assert where == {
        t.data_ptr() for layer in joined.every_layer() if getattr(layer, "in_line", False) for t in layer.data.values()
    }


def test_a_join_takes_the_largest_capacity_and_slack() -> None:
    model = toy("sliding and full")
    a, b = model.new_cache(capacity=20, slack=1), model.new_cache(rows=2, capacity=33, slack=4)
    joined = Cache.join([a, b])
    assert (joined.rows, joined.capacity, joined.slack, joined.limit) == (3, 33, 4, 33)


def test_a_step_runs_only_the_rows_it_is_told() -> None:
    model = toy("full")
    cache = model.new_cache(rows=3)
    step = cache.step(2, rows=[2, 0])
    found = model.forward(torch.tensor([[1, 2], [3, 4]]), step)
    step.commit()
    assert cache.tokens == [[3, 4], [], [1, 2]]
    assert found is not None
    assert_close(found[0], truth("full", (1, 2)))


def test_a_step_of_its_three_parts_is_the_call() -> None:
    model = toy("hybrid")
    one, two = model.new_cache(rows=2), model.new_cache(rows=2)
    ids = random_ids(2, 7)
    found = model(ids, cache=one)
    step = two.step(7)
    assert torch.equal(model.forward(ids, step), found)  # type: ignore[arg-type]
    assert two.lengths.tolist() == [0, 0]
    step.commit()
    assert two.tokens == one.tokens == ids.tolist()


# -- room ----------------------------------------------------------------------------------------------------------


def feed_plain(cache: Cache, T: int) -> None:
    step = cache.step(T)
    step.memory(0).recall(torch.zeros(cache.rows, T, 1))
    step.ids = torch.zeros(cache.rows, T, dtype=torch.int64)
    step.commit()


@pytest.mark.parametrize("T", [1, 16])
def test_growth_is_geometric(T: int) -> None:
    cache = Cache([{"x": Tokens(1, Full())}])
    stores, records = set(), set()
    for _ in range(4096 // T):
        feed_plain(cache, T)
        stores.add(cache.layers[0]["x"].data["x"].data_ptr())
        records.add(cache.record.data_ptr())
    assert cache.lengths.tolist() == [4096]
    assert cache.layers[0]["x"].slots == 4096
    assert len(stores) <= 8  # 32, 64 … 4096
    assert len(records) <= 13


def test_a_ring_never_has_more_slots_than_its_window_and_slack() -> None:
    cache = Cache([{"x": Tokens(1, Sliding(50, keep=3))}], slack=7)
    seen = set()
    for _ in range(200):
        feed_plain(cache, 1)
        seen.add(cache.layers[0]["x"].slots)
    assert seen == {32, 60}


def test_reserve_makes_room_once() -> None:
    cache = toy("full").new_cache(rows=2).reserve(100)
    before = cache.layers[0]["attention"].data["k"].data_ptr()
    for _ in range(10):
        toy("full")(random_ids(2, 10), cache=cache)
    assert cache.layers[0]["attention"].data["k"].data_ptr() == before


def test_padding_does_not_count_toward_the_capacity() -> None:
    world = World.fresh("full", 2, capacity=8)
    world.feed(7, [7, 2])
    world.feed(6, [1, 6])
    world.feed(5, [0, 0])
    assert world.cache.lengths.tolist() == [8, 8]
    world.check()


# -- inference mode ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside_first", [True, False])
def test_a_cache_works_inside_and_outside_of_inference_mode(kind: str, inside_first: bool) -> None:
    with torch.inference_mode(inside_first):
        world = World.fresh(kind, 2, slack=2)
        world.feed(7, [7, 3])
        joined = World.join([world, World.fresh(kind, 1, slack=3)])
        forked = world.made(world.cache.fork(), range(2))
    for inside in (not inside_first, inside_first):
        with torch.inference_mode(inside):
            for one in (world, forked, joined):
                one.feed(1)
                one.feed(3, accepted=[1] * len(one.rows))
                one.rewind([1] * len(one.rows))
                one.feed(4, fails_after=0)
                one.check()
    joined.reset([0])
    joined.feed(2)


def test_a_step_may_be_opened_inside_and_committed_outside_of_inference_mode() -> None:
    model = toy("hybrid")
    cache = model.new_cache(slack=1)
    ids = random_ids(1, 4)
    for piece in ids.split(2, dim=1):
        with torch.inference_mode():
            step = cache.step(2)
            model.forward(piece, step)
        step.commit()
    assert cache.logits is not None
    assert_close(cache.logits[0], truth("hybrid", tuple(ids[0].tolist()))[-1])
    assert cache.rewind(1).tokens == ids[:, :3].tolist()
