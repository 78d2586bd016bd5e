"""Caches in pages of a pool: what is shared, what is copied and when, what is counted, and what is refused.

That a cache in pages is a cache is in tests/laws, which draw pools as they draw codecs.
"""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import pytest

from lamina import Cache, InputError, PagesError, Pool, PrefixStore
from lamina.cache.layers.layout import Layout
from lamina.runtime.eligibility import why_no_kernels
from tests.generation.rows import MORE, PROMPTS, made, model_of, scratch
from tests.laws.toys import CODECS, assert_close, random_ids, toy
from tests.laws.world import World


def pages_of(cache: Cache) -> list[int]:
    """How many pages each kind has given to this cache."""
    assert cache.pages is not None
    return [len(table.pages) for table in cache.pages.tables.values()]


# -- what is copied --------------------------------------------------------------------------------------------------


def test_a_fork_of_a_long_row_copies_nothing_and_the_first_write_one_page_a_kind() -> None:
    model = toy("sliding and full")  # lines, and rings of two sizes
    pool = Pool(model, page=8)
    cache = model.new_cache(pool=pool)
    model(random_ids(1, 1001), cache=cache)
    used = pool.used
    fork = cache.fork()
    assert (pool.copied, pool.used) == (0, used)
    expected = cache.select([0, 0])
    assert (pool.copied, pool.used) == (0, used)
    model(random_ids(1, 1, seed=1), cache=fork)
    assert (pool.copied, pool.used) == (3, used + 3)
    model(random_ids(1, 1, seed=2), cache=fork)
    assert pool.copied == 3, "the page is its own by now"
    model(random_ids(2, 1, seed=2), cache=expected)
    assert pool.copied == 3 + 2 * 3, "two rows, of which neither is the last one to hold what they shared"
    model(random_ids(1, 1, seed=1), cache=cache)
    assert pool.copied == 9, "all others have copies: what is left is its own"
    pool.check()


def test_a_full_page_that_is_shared_is_never_copied() -> None:
    model = toy("full")
    pool = Pool(model, page=4)
    cache = model.new_cache(pool=pool)
    model(random_ids(1, 8), cache=cache)
    forks = [cache.fork() for _ in range(5)]
    for fork in forks:
        model(random_ids(1, 3), cache=fork)
    assert pool.copied == 0 and pool.used == 2 + 5


def test_reordering_rows_shares_pages_and_copies_the_last_one_when_it_is_written() -> None:
    model = toy("full")
    pool = Pool(model, page=4)
    cache = model.new_cache(2, pool=pool)
    model(random_ids(2, 6), cache=cache)
    cache.reorder([1, 1])
    assert (pool.copied, pool.used) == (0, 2)
    model(random_ids(2, 1), cache=cache)
    assert (pool.copied, pool.used) == (1, 3)
    assert cache.tokens[0] == cache.tokens[1][:-1] + cache.tokens[0][-1:]


STRATEGIES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3, "seed": 5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "deepseek_v3"])
def test_every_strategy_makes_the_same_tokens_in_pages_and_gives_back_what_it_took(family: str) -> None:
    model, prompt = model_of(family), [PROMPTS[0] + MORE[0] + PROMPTS[0]]
    for name, how in STRATEGIES.items():
        pool = Pool(model, page=4)
        found = made(model, prompt, cache=model.new_cache(pool=pool), **how)
        assert found.tokens == scratch(model, prompt, **how), name
        assert found.cache.pool is pool and pool.used
        again = made(model, [[9, 6]] * len(found.tokens), cache=found.cache)
        assert again.cache.tokens[0][: len(prompt[0])] == prompt[0]
        del found, again
        gc.collect()
        assert pool.check().used == 0, name


@pytest.mark.parametrize("kind", ["full", "sliding", "sliding, keep", "hybrid"])
def test_a_fork_in_the_middle_of_a_pass_is_not_changed_by_its_end(kind: str) -> None:
    for T in (1, 3):
        world = World.fresh(kind, 2, residence=3)
        world.feed(11, [11, 4])
        step = world.cache.step(T)
        before = world.made(world.cache.fork(), [0, 1])
        world.model.forward(random_ids(2, T), step)
        after = world.made(world.cache.fork(), [0, 1])
        step.commit()
        for fork in (before, after):
            fork.feed(2)
            fork.check()


def test_prompts_that_begin_alike_lie_in_a_prefix_store_once() -> None:
    model = model_of("llama")
    pool = Pool(model, page=4)
    store = PrefixStore(model, 2**30, pool=pool)
    plain = PrefixStore(model, 2**30)
    begin = [7 + i % 40 for i in range(80)]
    for last in range(6):
        prompt = [*begin, 3 + last, 9]
        found = made(model, [prompt], prefixes=store)
        assert found.tokens == made(model, [prompt], prefixes=plain).tokens
        assert found.reused[0] == (80 if last else 0)
        del found
    # The common 20 pages once, and for each of the six its last two.
    assert pool.check().used == 20 + 6 * 2
    assert pool.copied == 6, "one each: the last page of the prompt, which the snapshot made at its end shares"
    assert len(store) == 6 and store.nbytes < plain.nbytes / 3
    assert store.nbytes == sum(one.size.own for one in store._kept) + 32 * pool.groups[Layout()].page_bytes
    store.bytes = store.nbytes - 1
    made(model, [[5, 6, 7]], prefixes=store)
    assert store.nbytes <= store.bytes and store.sequences[0][80] > 3, "the oldest had to go"
    store.clear()
    gc.collect()
    assert pool.check().used == 0


# -- what is counted -------------------------------------------------------------------------------------------------


def test_pages_are_taken_as_tokens_come_and_given_back_as_they_go() -> None:
    model = toy("sliding and full")  # a ring of 3, a line, a ring of 6
    pool = Pool(model, page=4, slack=2)
    cache = model.new_cache(2, pool=pool)
    assert pages_of(cache) == [0, 0, 0] and pool.used == 0
    model(random_ids(2, 9), cache=cache, counts=[9, 2])
    assert pages_of(cache) == [2 + 1, 3 + 1, 2 + 1]  # rings of 5 and 8 slots
    cache.rewind([1, 2])
    assert pages_of(cache) == [2, 2, 2]
    cache.reset([0])
    assert pages_of(cache) == [0, 0, 0] and pool.used == 0
    model(random_ids(2, 40), cache=cache)
    assert pages_of(cache) == [4, 20, 4]
    assert cache.nbytes == 28 * pool.groups[Layout()].page_bytes
    fork = cache.fork()
    assert fork.nbytes == cache.nbytes and pool.used == 28
    assert "(0 B of its own, 14.0 KiB shared with others)" in str(fork)
    cache.release()
    assert "(14.0 KiB of its own, 0 B shared with others)" in str(fork)
    fork.release()
    assert pool.check().used == 0 and pool.free == sum(group.allocator.count for group in pool.groups.values())


def test_a_pool_of_so_many_tokens_holds_just_so_many() -> None:
    model = toy("sliding and full")
    pool = Pool(model, tokens=50, page=4)
    assert [group.allocator.count for group in pool.groups.values()] == [13, 13, 13]
    pool = Pool(model, tokens=50, page=4, rows=2)
    assert [group.allocator.count for group in pool.groups.values()] == [2, 13, 4]
    one = model.new_cache(capacity=4, slack=0).nbytes  # a page of each kind, the rings cut to their size
    assert one and pool.nbytes == sum((1 + group.allocator.count) * group.page_bytes for group in pool.groups.values())
    cache = model.new_cache(2, pool=pool)
    model(random_ids(2, 26), cache=cache, counts=[26, 24])
    assert pool.free == 0
    assert "13    13     0" in str(pool)


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_bytes_of_a_page_are_those_of_its_tokens(codec: str | None) -> None:
    model = toy("wide heads")
    given = None if codec is None else CODECS[codec]
    pool = Pool(model, page=4, codec=given)
    a_token = model.new_cache(capacity=4, codec=given).nbytes // 4
    assert sum(group.page_bytes for group in pool.groups.values()) == 4 * a_token


# -- running out -----------------------------------------------------------------------------------------------------


def test_running_out_of_pages_names_them_and_loses_nothing() -> None:
    pool = Pool(toy("full"), tokens=24, page=4)
    one, two = (World.fresh("full", 1, residence=pool) for _ in range(2))
    one.feed(11)
    two.feed(9)
    text = (
        "2 more pages of 4 tokens needed for attention, and of the pool's 6 0 are free. Nothing was changed: release a "
        "cache, take rows back with cache.rewind or cache.reset, or make a pool of more tokens (or None, which grows)."
    )
    for _ in range(2):
        with pytest.raises(PagesError, match=f"^{re.escape(text)}$"):
            one.model(random_ids(1, 8), cache=one.cache)
        assert pool.check().free == 0
        one.check()
    one.feed(1)  # there is room in its last page
    fork = one.made(one.cache.fork(), [0])
    with pytest.raises(PagesError, match=r"^1 more page of 4 tokens"):
        fork.model(random_ids(1, 1), cache=fork.cache)
    two.rewind([5])
    fork.feed(4)
    two.check()
    two.cache.release()
    one.feed(4)
    fork.check()
    assert pool.check().free == 1


def test_a_row_of_many_that_finds_no_page_leaves_all_as_they_were() -> None:
    pool = Pool(toy("sliding and full"), tokens=20, page=4)
    world = World.fresh("sliding and full", 3, residence=pool)
    world.feed(5, [5, 5, 3])
    held = pages_of(world.cache)
    with pytest.raises(PagesError):
        world.model(random_ids(3, 4), cache=world.cache)
    assert pages_of(world.cache) == held
    world.check()
    world.feed(4, [3, 3, 1])
    world.reset([1])
    world.feed(1, [1, 0, 1])


def test_what_the_host_is_not_sure_of_takes_no_page_that_another_needs() -> None:
    pool = Pool(toy("full"), tokens=12, page=2)
    world = World.fresh("full", 2, residence=pool)
    for _ in range(4):
        world.feed(5, [1, 0], unread=True)  # for all that the host knows, ten tokens
    assert world.cache.lengths.tolist() == [4, 0]
    world.check()


def test_a_pool_that_grows_keeps_what_all_of_its_caches_hold() -> None:
    pool = Pool(toy("sliding and full"), page=3)
    worlds = [World.fresh("sliding and full", 2, seed=seed, residence=pool) for seed in range(3)]
    before = pool.nbytes
    for _ in range(6):
        for world in worlds:
            world.feed(3)
            world.check()
    assert pool.nbytes > 4 * before


# -- dropping --------------------------------------------------------------------------------------------------------


def test_a_cache_that_was_reordered_gives_its_pages_back_at_once_when_it_is_dropped() -> None:
    model = toy("sliding and full")
    pool = Pool(model, page=4)
    cache = model.new_cache(2, pool=pool)
    model(random_ids(2, 9), cache=cache)
    gc.disable()  # it must not be needed
    try:
        cache.reorder([1, 1], [3, 3])
        del cache
        assert pool.check().used == 0
    finally:
        gc.enable()


def test_caches_that_are_dropped_give_their_pages_back_without_being_asked() -> None:
    model = toy("hybrid")
    pool = Pool(model, page=4)
    cache = model.new_cache(pool=pool)
    model(random_ids(1, 9), cache=cache)
    used = pool.used
    forks = [cache.fork() for _ in range(3)]
    for seed, fork in enumerate(forks):
        model(random_ids(1, 5, seed), cache=fork)
    step = forks[0].step(2)  # never committed
    assert pool.used > used
    del forks, fork, step
    assert pool.check().used == used
    del cache
    assert pool.check().used == 0


def test_threads_may_drop_and_run_caches_of_one_pool() -> None:
    model = toy("sliding and full")
    pool = Pool(model, tokens=4000, page=4)
    start = model.new_cache(pool=pool)
    model(random_ids(1, 10), cache=start)
    expected = [model(random_ids(1, 6, seed), cache=start.fork()) for seed in range(4)]
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(12):
                forks = [start.fork() for _ in range(3)]
                found = model(random_ids(1, 6, seed), cache=forks[1])
                assert_close(found, expected[seed])  # type: ignore[arg-type]
                del forks
                pool.check()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    start.release()
    assert pool.check().used == 0


def test_a_released_cache_says_so_and_may_be_released_again() -> None:
    model = toy("full")
    for pool in (None, Pool(model, page=4)):
        cache = model.new_cache(pool=pool)
        model(random_ids(1, 3), cache=cache)
        cache.release()
        cache.release()
        assert str(cache) == "Cache, released"
        for use in (cache.fork, lambda c=cache: model([[1]], cache=c), lambda c=cache: c.rewind(1), cache.reset):
            with pytest.raises(
                InputError,
                match=r"^this cache was released and holds no memory any more: make a new one with model.new_cache$",
            ):
                use()


# -- what is refused -------------------------------------------------------------------------------------------------


def test_what_does_not_fit_a_pool_is_refused_by_name() -> None:
    model = toy("full")
    pool = Pool(model, page=4, slack=2, codec="int8")
    cases: list[tuple[Any, str]] = [
        (lambda: toy("sliding").new_cache(pool=pool), "this pool was made for another model"),
        (lambda: model.new_cache(slack=3, pool=pool), "slack=3, but the pool keeps a slack of 2: give it to the pool"),
        (lambda: model.new_cache(codec="int4", pool=pool), "codec='int4', but the pool has a codec of its own, 'int8'"),
        (
            lambda: model.new_cache(residence="host", pool=pool),
            "residence='host' and a pool were given: pages of a pool are on the device; leave one out",
        ),
        (lambda: Pool(model, tokens=0), "tokens=0: it must be at least 1"),
        (lambda: Pool(model, rows=2), "rows=2 without tokens: a pool that grows needs no bounds"),
        (
            lambda: Cache.join([model.new_cache(pool=Pool(model)), model.new_cache(slack=2)]),
            "a cache with a slack of 2 cannot be joined into a pool with a slack of 0: make the pool with slack=2",
        ),
    ]
    for make, text in cases:
        with pytest.raises(InputError, match=f"^{re.escape(text)}"):
            make()
    cache = model.new_cache(slack=2, codec="int8", pool=pool)
    assert cache.slack == 2 and cache.pool is pool


def test_a_pool_too_small_for_a_file_loses_nothing(tmp_path: Any) -> None:
    from lamina import load_cache

    model = toy("full")
    cache = model.new_cache()
    model(random_ids(1, 20), cache=cache)
    cache.save(tmp_path / "cache")
    pool = Pool(model, tokens=16, page=4)
    with pytest.raises(PagesError):
        load_cache(tmp_path / "cache", model, pool=pool)
    assert pool.check().used == 0
    with pytest.raises(InputError, match=r"^the file's cache has a slack of 0, the pool 1"):
        load_cache(tmp_path / "cache", model, pool=Pool(model, slack=1))


def test_pages_stand_in_the_way_of_no_captured_step() -> None:
    model = toy("full")
    assert why_no_kernels(model.specs, model.new_cache(pool=Pool(model)).layers) is None
