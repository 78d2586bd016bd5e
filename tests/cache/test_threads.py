"""Caches of several threads over one pool that grows: each gives what it gives alone, and no token is lost."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lamina import Pool
from lamina.cache import Cache
from lamina.cache.pool.streams import Streams
from tests.generation.rows import made, model_of, scratch
from tests.laws.toys import VOCAB, assert_close, toy, truth


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns after a few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*runs: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(runs)) as threads:
        return [future.result(timeout=60) for future in [threads.submit(run) for run in runs]]


class Pausing(dict[str, torch.Tensor]):
    """The tensors of a layer in a pool; where a copy is about to take the place of one, somebody else has his turn."""

    def __init__(self, fields: dict[str, torch.Tensor]) -> None:
        super().__init__(fields)
        self.copied, self.go_on = threading.Event(), threading.Event()

    def __setitem__(self, name: str, new: torch.Tensor) -> None:
        self.copied.set()
        self.go_on.wait(0.2)
        super().__setitem__(name, new)


def test_a_token_that_is_written_while_the_pool_grows_is_not_lost() -> None:
    model = toy("full")
    pool = Pool(model, page=2)
    (kind,) = pool.groups.values()
    kind.data = {key: Pausing(fields) for key, fields in kind.data.items()}  # type: ignore[misc]
    last: Any = list(kind.data.values())[-1]
    last.go_on.set()
    one, other = model.new_cache(pool=pool), model.new_cache(pool=pool)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    model([ids[:5]], cache=one)
    step = one.step(1)  # has its page, and is going to write
    last.copied.clear()
    last.go_on.clear()

    def grow() -> None:
        model([ids * 4], cache=other)

    def write() -> None:
        assert last.copied.wait(10)
        model.forward(torch.tensor([ids[5:6]]), step)
        last.go_on.set()

    together(grow, write)
    step.commit()
    found = model([ids[6:]], cache=one.poison())
    assert found is not None
    assert_close(found[0], truth("full", tuple(ids))[-2:])
    pool.check()


@pytest.mark.parametrize("kind", ["sliding and full", "hybrid"])
def test_threads_that_share_a_growing_pool_compute_what_each_computes_alone(kind: str, often: None) -> None:
    model = toy(kind)
    pool = Pool(model, page=2, slack=1)
    start = threading.Barrier(3)

    def run(number: int) -> None:
        rng = random.Random(number)
        start.wait()
        for _ in range(3):
            cache: Cache = model.new_cache(pool=pool)
            ids: list[int] = []
            for _ in range(8):
                new = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 3]))]
                found = model([new], cache=cache)
                ids += new
                assert found is not None
                assert_close(found[0], truth(kind, tuple(ids))[-len(new) :])
                if rng.random() < 0.3:
                    cache = cache.fork()
                if rng.random() < 0.2:
                    cache.rewind(1)
                    ids.pop()

    together(*(lambda number=number: run(number) for number in range(3)))
    assert pool.check().used == 0


def test_generations_in_two_threads_over_one_growing_pool_give_the_tokens_of_each_alone(often: None) -> None:
    model = model_of("llama")
    pool = Pool(model, page=4)
    prompts = [[[5, 6, 7], [8, 9]], [[1, 2], [3, 4, 5, 6]]]
    expected = [scratch(model, rows, new=12) for rows in prompts]
    for _ in range(2):
        found = together(*(
            lambda rows=rows: made(model, rows, new=12, cache=model.new_cache(2, pool=pool)).tokens for rows in prompts
        ))  # fmt: skip
        assert found == expected
    assert pool.check().used == 0


def test_a_pool_of_fixed_size_locks_nothing_in_a_pass() -> None:
    model = toy("full")
    for pool, locks in ((Pool(model, tokens=32, page=4), False), (Pool(model, page=4), True)):
        (kind,) = pool.groups.values()
        assert (kind.steady is pool.lock) == locks
        assert kind.reading is not pool.lock  # a CPU reads at once


class Stream:
    """Stands for a CUDA stream: what it was told to wait for."""

    def __init__(self, name: str) -> None:
        self.name, self.waits = name, list[str]()

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


def test_streams_wait_for_each_other_where_pages_change_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    current, other = Stream("current"), Stream("other")
    streams = Streams(torch.device("cuda"))
    for stream in (other, current):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        streams.add_current()
        streams.add_current()
    streams.wait_for_others()
    assert (current.waits, other.waits) == (["other"], [])
    streams.hold_others()
    assert (current.waits, other.waits) == (["other"], ["current"])
    alone = Streams(torch.device("cpu"))
    alone.add_current()
    alone.wait_for_others()
    assert alone.seen == []
