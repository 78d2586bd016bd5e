"""A prefix store in a pool of a fixed size: snapshots make room for generations that need their pages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lamina import PagesError, Pool, PrefixStore
from tests.generation.test_prefixes import ENDLESS, PLENTY, ids, model_of


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """Pages must come free without the garbage collector, which may not run for long."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_least_recently_used_snapshots_go_when_a_generation_needs_their_pages() -> None:
    model = model_of("llama")
    pool = Pool(model, tokens=4 * 10, page=4)
    store = PrefixStore(model, PLENTY, pool=pool)
    prompts = [ids(10, model.vocab, seed) for seed in range(3)]
    for prompt in prompts:
        model.generate([prompt], 2, prefixes=store, **ENDLESS)
    assert pool.used == 3 * 3
    assert model.generate([prompts[0]], 1, prefixes=store, **ENDLESS).reused == [10]  # used last now
    assert [one[:10] for one in store.sequences] == [prompts[1], prompts[2], prompts[0]]
    new = ids(11, model.vocab, 9)
    found = model.generate([new], 1, prefixes=store, **ENDLESS)  # 3 pages, and a copy of the one its snapshot shares
    assert found.tokens == model.generate([new], 1, **ENDLESS).tokens
    assert [one[:10] for one in store.sequences] == [prompts[2], prompts[0], new[:10]]
    assert "is not kept: it had to make room in the pool." in store.explain(prompts[1])
    assert model.generate([prompts[0]], 1, prefixes=store, **ENDLESS).reused == [10]
    pool.check()


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1", "deepseek_v3"])
def test_a_pool_that_is_full_of_snapshots_serves_every_prompt_rightly(family: str) -> None:
    model = model_of(family)
    pool = Pool(model, tokens=4 * 12, page=4)
    store = PrefixStore(model, PLENTY, pool=pool)
    base = ids(9, model.vocab, 0)
    prompts = [base + ids(1 + n % 7, model.vocab, n) if n % 2 else ids(16, model.vocab, n) for n in range(6)]
    for prompt in prompts:
        cold = model.generate([prompt], 3, **ENDLESS).tokens
        assert model.generate([prompt], 3, prefixes=store, **ENDLESS).tokens == cold
        assert model.generate([prompt], 3, prefixes=store, **ENDLESS).tokens == cold
        pool.check()
    assert prompts[0] not in [one[:16] for one in store.sequences]
    assert prompts[-1] == store.sequences[-1][: len(prompts[-1])]


def test_a_row_that_shares_its_last_page_with_its_own_snapshot_takes_it_back() -> None:
    model = model_of("llama")
    pool = Pool(model, tokens=4 * 3, page=4)
    store = PrefixStore(model, PLENTY, pool=pool)
    prompt = ids(10, model.vocab, 0)  # ends inside the third page, which the snapshot of the prompt shares
    found = model.generate([prompt], 2, prefixes=store, **ENDLESS)
    assert found.tokens == model.generate([prompt], 2, **ENDLESS).tokens
    assert pool.check().copied == 0


def test_caches_without_the_store_take_its_pages_too_and_other_stores_give_theirs() -> None:
    model = model_of("llama")
    pool = Pool(model, tokens=4 * 8, page=4)
    stores = [PrefixStore(model, PLENTY, pool=pool) for _ in range(2)]
    for seed, store in enumerate(stores):
        model.generate([ids(12, model.vocab, seed)], 2, prefixes=store, **ENDLESS)
    assert [len(store) for store in stores] == [1, 1] and pool.free == 0
    prompt = ids(20, model.vocab, 5)
    found = model.generate([prompt], 9, cache=model.new_cache(pool=pool), **ENDLESS)
    assert found.tokens == model.generate([prompt], 9, **ENDLESS).tokens
    assert [len(store) for store in stores] == [0, 0]
    del stores, store
    assert not pool._living_stores(), "a pool does not keep stores alive"


def test_nothing_is_dropped_where_it_would_not_help() -> None:
    model = model_of("llama")
    pool = Pool(model, tokens=4 * 8, page=4)
    store = PrefixStore(model, PLENTY, pool=pool)
    held = model.new_cache(pool=pool)
    model([ids(16, model.vocab, 0)], cache=held)
    model.generate([ids(7, model.vocab, 1)], 1, prefixes=store, **ENDLESS)
    before, used = store.sequences, pool.used
    with pytest.raises(PagesError, match="5 more pages of 4 tokens needed"):
        model([ids(20, model.vocab, 2)], cache=model.new_cache(pool=pool))
    assert (store.sequences, pool.check().used) == (before, used)
    elsewhere = model.new_cache()  # holds nothing of the pool
    model([ids(5, model.vocab, 8)], cache=elsewhere)
    store._keep_rows(elsewhere)
    before = store.sequences
    # A snapshot whose pages a row in use shares is of no help either, and stays; the one that frees pages goes.
    first, _ = store._start([store._kept[0].ids])
    model.generate([ids(6, model.vocab, 3)], 1, prefixes=store, **ENDLESS)
    model([ids(8, model.vocab, 4)], cache=model.new_cache(pool=pool))
    assert sorted(store.sequences) == sorted(before)
    del first
    pool.check()


def test_asking_for_more_pages_than_there_can_be_drops_nothing() -> None:
    model = model_of("llama")
    pool = Pool(model, tokens=4 * 4, page=4)
    store = PrefixStore(model, PLENTY, pool=pool)
    model.generate([ids(6, model.vocab, 0)], 1, prefixes=store, **ENDLESS)
    cache = model.new_cache(pool=pool).reserve(20)
    assert cache.pages is not None
    assert not cache.pages.runs_short([(0, 0, 8)]) and len(store) == 1
    assert cache.pages.runs_short([(0, 0, 17)]) and len(store) == 1
    assert not cache.pages.runs_short([(0, 0, 9)]) and len(store) == 0


def test_threads_that_keep_snapshots_and_threads_that_need_pages_share_a_pool() -> None:
    model = model_of("llama")
    pool = Pool(model, tokens=4 * 40, page=4)
    store = PrefixStore(model, PLENTY, pool=pool)
    prompts = [ids(9 + n % 5, model.vocab, n) for n in range(32)]
    cold = [model.generate([prompt], 3, **ENDLESS).tokens for prompt in prompts]
    with ThreadPoolExecutor(6) as threads:
        warm = list(threads.map(lambda one: model.generate([one], 3, prefixes=store, **ENDLESS).tokens, prompts))
    assert warm == cold
    assert 0 < len(store) < 32 and pool.check().used <= 40


def test_a_store_is_never_called_with_the_pools_lock_held() -> None:
    """A thread that keeps a snapshot holds the store's lock while it waits for the pool's."""
    model = model_of("llama")
    pool = Pool(model, tokens=4 * 4, page=4)

    class Watched(PrefixStore):
        asked = 0

        def tables(self) -> Any:
            self.others_get_the_lock()
            return super().tables()

        def drop(self, pages: Any) -> bool:
            self.others_get_the_lock()
            return super().drop(pages)

        def others_get_the_lock(self) -> None:
            self.asked += 1
            with ThreadPoolExecutor(1) as another:
                assert another.submit(lambda: pool.lock.acquire(timeout=5) and not pool.lock.release()).result()

    store = Watched(model, PLENTY, pool=pool)
    for seed in range(2):
        model.generate([ids(11, model.vocab, seed)], 1, prefixes=store, **ENDLESS)
    cache = model.new_cache(pool=pool).reserve(16)
    assert cache.pages is not None
    assert cache.pages.runs_short([(0, 0, 20)]) is True
    assert cache.pages.runs_short([(0, 0, 16)]) is False
    assert store.asked >= 5 and len(store) == 0
