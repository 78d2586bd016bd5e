"""Caches that are stored on the host: what moves, what is on the device, and that nothing else is different."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lamina
from lamina import Cache, InputError, Source
from lamina.attention.window import Sliding
from lamina.cache.layers.layout import Layout
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.cache.ops.snapshot import take_snapshot
from lamina.cache.storage.prefetch import Prefetcher, on_host
from lamina.cache.summary import lines
from lamina.rehearsal.meter import AllocationMeter
from lamina.runtime.compile import why_not_compiled
from lamina.runtime.eligibility import why_not_captured, why_not_read
from tests.cache.pretend import DEVICE, two_devices
from tests.laws.toys import (
    CODECS,
    DELTA,
    SCAN,
    WIDTH,
    Attend,
    Convolve,
    Recur,
    Together,
    Toy,
    assert_close,
    codec_for,
    random_ids,
    toy,
    truth,
)  # fmt: skip
from tests.laws.world import World, reloaded
from tests.planning.models import model as family
from tests.planning.models import owned

TOKEN = 2 * 2 * 4 * 8  # bytes of a token in a layer: keys and values, heads, numbers


def fetcher(cache: Cache) -> Prefetcher:
    assert cache.fetcher is not None
    return cache.fetcher


def moved(cache: Cache, run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that come from the host and go there."""
    counted = fetcher(cache)
    before = counted.moved_in, counted.moved_out
    run()
    return counted.moved_in - before[0], counted.moved_out - before[1]


def feed(cache: Cache, T: int, counts: list[int] | None = None, rows: list[int] | None = None) -> None:
    assert cache.model is not None
    step = cache.step(T, counts, rows)
    cache.model.forward(random_ids(cache.rows if rows is None else len(rows), T), step)
    step.commit()


# -- only what is needed moves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, 500])
def test_a_step_of_one_token_fetches_the_tokens_there_are_and_writes_one(capacity: int | None) -> None:
    cache = toy("full").new_cache(capacity=capacity, residence="host")
    for length in range(1, 6):
        feed(cache, 1)
        assert moved(cache, lambda: feed(cache, 1)) == (2 * (2 * length - 1) * TOKEN, 2 * TOKEN)
    assert moved(cache, lambda: feed(cache, 7)) == (2 * 10 * TOKEN, 2 * 7 * TOKEN)


def test_a_prompt_fetches_nothing() -> None:
    cache = toy("full").new_cache(2, residence="host")
    assert moved(cache, lambda: feed(cache, 9)) == (0, 2 * 2 * 9 * TOKEN)


def test_rows_fetch_as_many_tokens_as_each_holds_and_write_as_many_as_are_real() -> None:
    cache = toy("full").new_cache(3, residence="host")
    feed(cache, 9, [9, 4, 0])
    assert moved(cache, lambda: feed(cache, 5, [0, 5, 2])) == (2 * 13 * TOKEN, 2 * 7 * TOKEN)
    assert moved(cache, lambda: feed(cache, 3, rows=[2, 0])) == (2 * (2 + 9) * TOKEN, 2 * 6 * TOKEN)


@pytest.mark.parametrize("slack", [0, 5])
def test_of_a_ring_only_what_new_tokens_can_see_comes_and_only_what_stays_goes_back(slack: int) -> None:
    cache = toy("sliding").new_cache(slack=slack, residence="host")  # windows of four
    feed(cache, 2)
    assert moved(cache, lambda: feed(cache, 1)) == (2 * 2 * TOKEN, 2 * TOKEN)
    feed(cache, 20)
    assert moved(cache, lambda: feed(cache, 1)) == (2 * 3 * TOKEN, 2 * TOKEN)
    assert moved(cache, lambda: feed(cache, 20)) == (2 * 3 * TOKEN, 2 * (4 + slack) * TOKEN)


def test_first_tokens_that_a_ring_keeps_come_with_it() -> None:
    cache = Toy(Attend(Sliding(4, keep=2))).new_cache(residence="host")
    feed(cache, 30)
    assert moved(cache, lambda: feed(cache, 1)) == ((2 + 3) * TOKEN, TOKEN)


def test_states_go_both_ways_whole_and_of_a_log_only_new_inputs_go() -> None:
    state = SCAN.state_shape[0] * SCAN.state_shape[1] * 8
    inputs = sum(torch.Size(shape).numel() for shape in SCAN.input_shapes.values()) * 8
    plain = toy("selective scan").new_cache(residence="host")
    feed(plain, 5)
    assert moved(plain, lambda: feed(plain, 1)) == (2 * state, 2 * state)
    slack = toy("selective scan").new_cache(slack=4, residence="host")
    feed(slack, 5)
    assert moved(slack, lambda: feed(slack, 2)) == (2 * state, 2 * (state + 2 * inputs))
    whole = state + 8 * inputs  # base and log, for moving the base, and the head it may start from
    assert moved(slack, lambda: feed(slack, 2)) == (2 * (state + state + whole), 2 * (2 * state + 2 * inputs))


def test_refused_tokens_cost_the_state_before_them_once_more() -> None:
    cache, state = toy("gated delta").new_cache(residence="host"), 2 * 3 * 2 * 8
    feed(cache, 4)

    def half() -> None:
        step = cache.step(4)
        toy("gated delta").forward(random_ids(1, 4), step)
        step.commit(2)

    assert moved(cache, half) == (2 * 2 * state, 2 * 2 * state)  # a new state is sent, and then the right one


def test_codes_move_as_codes() -> None:
    plain, coded = (toy("wide heads").new_cache(codec=codec, residence="host") for codec in (None, "int4"))
    for cache in (plain, coded):
        feed(cache, 6)
    found = [moved(cache, lambda cache=cache: feed(cache, 1)) for cache in (plain, coded)]  # type: ignore[misc]
    assert all(8 * less < more for more, less in zip(*found, strict=True))


# -- what is on the device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "sliding and full", "hybrid", "tokens", "convolution", "cross"])
def test_there_are_two_windows_of_one_layer_each_however_many_layers_there_are(kind: str) -> None:
    cache = World.fresh(kind, 2, capacity=64, slack=2, residence="host").cache
    feed(cache, 40)
    layers = [sum(layer.nbytes for layer in entry.values() if on_host(layer)) for entry in cache.layers]
    parts = max(len(layer.data) for layer in cache.every_layer()) * 3
    assert len(fetcher(cache).buffers) == 2
    assert 2 * max(layers) - 64 <= fetcher(cache).nbytes <= 2 * (max(layers) + parts * 256)  # lengths stay; rounding
    assert {line.kind: line.residence for line in lines(cache)}["fetched"] == "device"


def test_windows_grow_with_the_cache_and_are_used_again() -> None:
    cache = toy("full").new_cache(residence="host")
    feed(cache, 20)
    windows = [window.buffer for window in fetcher(cache).buffers]
    assert fetcher(cache).nbytes == 2 * 32 * TOKEN
    feed(cache, 5)
    assert all(one is two.buffer for one, two in zip(windows, fetcher(cache).buffers, strict=True))
    feed(cache, 39)
    assert fetcher(cache).nbytes == 2 * 64 * TOKEN
    feed(cache, 1)
    assert fetcher(cache).nbytes == 2 * 128 * TOKEN


@pytest.mark.parametrize("kind", ["sliding and full", "hybrid", "shared"])
def test_after_a_pass_nothing_is_held_but_the_cache(kind: str) -> None:
    model = toy(kind)
    gc.disable()  # nothing may wait for it
    try:
        with AllocationMeter() as held:
            cache = model.new_cache(2, slack=2, residence="host")
            for T in (20, 1, 30, 3, 40):
                feed(cache, T)
        assert held.now == owned(cache)
    finally:
        gc.enable()


def test_a_pass_over_one_row_needs_windows_for_one_row() -> None:
    cache = toy("full").new_cache(4, capacity=32, residence="host")
    feed(cache, 5, rows=[2])
    assert fetcher(cache).nbytes == 2 * 32 * TOKEN


def test_a_layer_that_others_read_has_a_window_of_its_own() -> None:
    cache = toy("shared").new_cache(capacity=32, residence="host")
    feed(cache, 5)
    assert len(fetcher(cache).own) == 2


def test_what_cannot_live_on_the_host_stays_on_the_device_and_is_shown_there() -> None:
    cache = toy("from outside, among others").new_cache(residence="host")
    where = {line.kind: line.residence for line in lines(cache)}
    assert where["peak"] == "device"
    assert where["attention, sliding 4"] == where["GatedDelta"] == "host"
    outside = toy("from outside").new_cache(residence="host")
    assert outside.fetcher is None and "host" not in str(outside)


def test_a_table_says_where_bytes_live() -> None:
    cache = toy("full").new_cache(capacity=32, residence="host")
    feed(cache, 3)
    assert str(cache) == (
        "Cache of 1 row, capacity 32, slack 0, lengths [3]\n"
        "kind       layers  slots  dtype       bytes\n"
        "---------  ------  -----  -------  --------  ------\n"
        "attention       2     32  float64   8.0 KiB  host\n"
        "fetched                             8.0 KiB  device\n"
        "token ids              3  int64        24 B  device\n"
        "logits                    float64     104 B  device\n"
        "clock                     int64        25 B  device\n"
        "all             2                  16.1 KiB\n"
        "                                    8.1 KiB  device\n"
        "                                    8.0 KiB  host"
    )


def test_keys_lie_token_by_token_so_that_a_run_of_a_row_is_one_piece() -> None:
    cache = toy("full").new_cache(3, residence="host")
    feed(cache, 40)
    for one in (cache, cache.select([1, 1]), cache.fork(), Cache.join([cache, cache]), reloaded(cache)):
        keys = one.layers[0]["attention"].data["k"]
        assert keys.shape[1:] == (2, max(40, keys.shape[2]), 4)
        assert keys.transpose(1, 2).is_contiguous()
        assert on_host(one.layers[0]["attention"])


# -- nothing else is different -------------------------------------------------------------------------------------


MIXED = [
    "full",
    "sliding, keep",
    "latent, sliding",
    "convolution",
    "gated delta",
    "hybrid",
    "cross",
    "shared",
    "tokens",
]


@pytest.mark.parametrize("kind", [*MIXED, "from outside, among others"])
def test_no_operation_mixes_host_and_device(kind: str) -> None:
    model = copy.deepcopy(toy(kind))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device=DEVICE)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
    model.prepare = lambda positions: positions[..., None].double().expand(-1, -1, WIDTH)  # type: ignore[method-assign]

    def new(rows: int, slack: int) -> Cache:
        cache = model.new_cache(rows, slack=slack, residence="host")
        if kind == "cross":
            states = torch.empty(rows, 5, WIDTH, dtype=torch.float64, device=DEVICE)
            cache.attach(Source(states, torch.full((rows,), 5, device=DEVICE)))
        return cache

    def go(
        cache: Cache, T: int, counts: list[int] | None = None, rows: list[int] | None = None, take: object = None
    ) -> None:
        step = cache.step(T, counts, rows)
        model.forward(torch.zeros(len(step.before), T, dtype=torch.int64, device=DEVICE), step)
        step.commit(take)  # type: ignore[arg-type]

    with two_devices():
        cache = new(2, slack=3)
        go(cache, 9)
        go(cache, 1)
        go(cache, 5, [2, 5])
        go(cache, 1, rows=[1])
        go(cache, 4, rows=[1, 0], take=[2, 0])
        go(cache.poison(), 1)
        go(cache.fork(), 3)
        cache.rewind([2, 1]).reorder([1, 1]).reset([0] if kind != "cross" else [])
        go(cache, 2)
        other = new(1, slack=4)
        go(other, 6)
        joined = Cache.join([cache, other])
        go(joined, 1)
        take_snapshot(joined, 2)
        for layer in filter(on_host, joined.every_layer()):
            assert {x.device.type for name, x in layer.data.items() if name != "lengths"} == {"cpu"}


@pytest.mark.parametrize("kind", ["sliding and full", "hybrid", "shared", "latent, sliding"])
def test_stale_bytes_in_windows_never_reach_an_output(kind: str) -> None:
    world = World.fresh(kind, 3, None, 2, seed=1, codec=codec_for(kind, "k5v4"), residence="host")
    rng = random.Random(0)
    for T in (4, 1, 9, 1, 2, 1):
        if world.cache.fetcher is not None:
            world.cache.fetcher.poison()
        world.feed(T, [rng.randint(0, T) for _ in range(3)], poison=False)


@pytest.mark.parametrize("kind", ["full", "hybrid", "gated delta"])
def test_a_pass_that_is_dropped_halfway_leaves_the_host_as_it_was(kind: str) -> None:
    world = World.fresh(kind, 2, None, slack=2, residence="host")
    world.feed(7)
    kept = [{n: x.clone() for n, x in layer.used(7, 7).data.items()} for layer in world.cache.every_layer()]
    world.feed(4, fails_after=0, poison=False)
    world.feed(4, fails_after=-1, poison=False)
    for before, layer in zip(kept, world.cache.every_layer(), strict=True):
        assert all(torch.equal(x, layer.used(7, 7).data[n]) for n, x in before.items())
    world.feed(1, fails_after=1)
    world.feed(3)


def test_two_passes_may_be_open_and_the_later_one_counts() -> None:
    world = World.fresh("sliding and full", 2, residence="host")
    world.feed(6)
    stale = world.cache.step(1)
    stale.memory(0)
    world.feed(2)
    with pytest.raises(InputError, match="this step is closed"):
        stale.commit()
    world.feed(1)


def test_counts_on_the_device_are_read_when_a_pass_is_opened() -> None:
    world = World.fresh("hybrid", 2, None, slack=1, residence="host")
    world.feed(5, [3, 5], unread=True)
    world.feed(4, [4, 2], accepted=[1, 2], unread=True)
    assert world.cache.clock.exact
    world.check()


class Hybrid(Toy):
    def __init__(self) -> None:
        super().__init__(Together(), Attend(Sliding(6)), Recur(DELTA), Convolve(3), Attend())


def test_a_hybrid_with_int4_rings_on_the_host_forked_rewound_saved_loaded_and_continued_is_the_plain_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Hybrid()
    monkeypatch.setattr("tests.laws.toys.toy", lambda kind: model)
    truth.cache_clear()
    ids = random_ids(2, 30, seed=3)
    cache = model.new_cache(2, slack=4, codec=CODECS["int4"], residence="host")
    model(ids[:, :11], cache=cache)
    other = cache.fork()
    model(random_ids(2, 3, seed=9), cache=other)
    other.rewind(3).save(tmp_path / "cache")
    model(random_ids(2, 5, seed=8), cache=cache)  # the parent goes its own way
    outs = []
    for residence in ("host", "device"):
        loaded = lamina.load_cache(tmp_path / "cache", model, residence=residence)
        assert loaded.residence == residence
        parts = [model(piece, cache=loaded) for piece in ids[:, 11:].split([1, 7, 1, 10], dim=1)]
        outs.append(torch.cat([part for part in parts if part is not None], dim=1))
    for row, found in enumerate(outs[0]):
        # To rounding, it is the plain run whose keys and values went through the codec once: the codec's bound.
        assert_close(found, truth("hybrid run", tuple(ids[row].tolist()), None, "int4")[11:], "on the host")
    assert_close(outs[1], outs[0], "on the device")
    truth.cache_clear()


def test_generating_on_the_host_makes_the_same_tokens() -> None:
    model = family("falcon_h1", torch.float32)
    for given in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        near, far = (
            model.generate([[1, 2, 3], [4, 5]], 12, cache=model.new_cache(2, slack=4, residence=where), **given)
            for where in ("device", "host")
        )
        assert near.tokens == far.tokens, given
        assert far.cache.residence == "host"


def test_a_fork_shares_no_memory_on_the_host_or_in_windows() -> None:
    cache = toy("hybrid").new_cache(2, slack=2, residence="host")
    feed(cache, 5)
    twin = cache.fork()
    feed(twin, 1)
    ours, theirs = (
        {x.data_ptr() for one in c.every_layer() for x in one.data.values()}
        | {w.buffer.data_ptr() for w in fetcher(c).buffers if w.buffer is not None}
        for c in (cache, twin)
    )
    assert ours.isdisjoint(theirs)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_an_unknown_residence_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"there is no residence 'hots'; the nearest is 'host'"):
        toy("full").new_cache(residence="hots")


def test_caches_of_two_residences_are_not_joined() -> None:
    near, far = (toy("full").new_cache(residence=where) for where in ("device", "host"))
    with pytest.raises(InputError, match=r"stored on the device and one that is stored on the host"):
        Cache.join([near, far])


def test_fast_paths_say_that_the_bytes_live_on_the_host() -> None:
    cache = toy("full").new_cache(residence="host")
    feed(cache, 3)
    step = cache.step(1)
    assert why_not_compiled(step, torch.zeros(1, 1, WIDTH)) == (
        "its cache is stored on the host, and layers are fetched one by one"
    )
    step.abort()


def test_a_captured_step_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.kernels.why_not", lambda _: None)
    monkeypatch.setattr(Toy, "device", torch.device("cuda"))
    model = Toy(Attend())
    far = Cache(model.specs, residence="host")
    assert why_not_captured(model, far) == "its cache is stored on the host; a captured step reads device memory"
    assert why_not_read(far) == why_not_captured(model, far)
    assert why_not_captured(model, Cache(model.specs)) is None


# -- runs of slots -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(), Layout(ring=1), Layout(ring=5), Layout(ring=4, keep=3)])
def test_runs_are_the_slots_of_positions_that_are_still_there(layout: Layout) -> None:
    for first in range(14):
        for end in range(first, 18):
            kept = [
                p for p in range(first, end)
                if layout.ring is None or p < layout.keep or p >= max(layout.keep, end - layout.ring)
            ]  # fmt: skip
            slots = layout.slots(torch.tensor(kept, dtype=torch.int64)).tolist()
            runs = layout.runs(first, end)
            assert sorted(s for a, b in runs for s in range(a, b)) == sorted(slots)
            assert len(runs) <= 3


def test_a_state_that_is_kept_is_the_one_that_was_sent() -> None:
    cache = toy("gated delta").new_cache(2, residence="host")
    feed(cache, 4)
    layer = cache.layers[0]["state"]
    assert isinstance(layer, RecurrentLayer)
    before: Tensor = layer.data["head"]
    feed(cache, 1)
    assert layer.data["head"] is not before  # taken over, not copied
    feed(cache, 1, rows=[1])
    assert cache.lengths.tolist() == [5, 6]
