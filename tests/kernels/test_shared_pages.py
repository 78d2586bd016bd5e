"""Captured steps and passes write no page that another cache shares."""

from __future__ import annotations

import pytest
import torch

import lamina
from lamina.generation.prompt import from_rows
from lamina.generation.strategies.captured import decode_captured
from lamina.generation.strategies.plain import decode_plain
from lamina.model import Model
from lamina.runtime import Graphs
from lamina.sampling.chooser import Chooser
from tests.kernels.passes import plainly, same
from tests.kernels.runs import PROMPTS, begin, small, start

pytestmark = pytest.mark.usefixtures("few_programs")


def alternating(model: Model, caches: list[lamina.Cache]) -> tuple[list[list[list[int]]], int]:
    """Two runs by turns through one captured step, of other first tokens."""
    graphs = Graphs(model)
    ids = [torch.tensor(first) for first in ([3, 4], [5, 6])]
    for _ in range(2):
        for number, cache in enumerate(caches):
            with graphs.step(2, Chooser(), cache) as step:
                step.begin(cache, ids[number], [2, 2], ())
                step.run(2)
                ids[number] = step.ids[:, 0].clone()
    return [cache.tokens for cache in caches], graphs.captures


def test_two_forks_by_turns_through_one_step_are_as_independent_caches() -> None:
    model = small("gemma2")
    pool = lamina.Pool(model, page=4)  # it grows, and lies elsewhere afterwards
    root, apart = start(model, pool=pool)[0], [start(model)[0] for _ in range(2)]
    forks = [root.fork(), root.fork()]
    found, captures = alternating(model, forks)
    assert (found, captures) == alternating(model, apart) and captures == 1
    assert root.tokens == PROMPTS and pool.check().copied > 0
    more = torch.tensor([[1, 2], [3, 4]])
    expected = model(more, cache=start(model)[0])
    torch.testing.assert_close(model(more, cache=root), expected, rtol=1e-4, atol=1e-4)
    for fork, one in zip(forks, apart, strict=True):
        torch.testing.assert_close(model(more, cache=fork), model(more, cache=one), rtol=1e-4, atol=1e-4)


def test_a_fork_in_the_middle_of_a_run_stays_what_it_was() -> None:
    model = small("gemma2")
    pool, forks, ids = lamina.Pool(model, page=4), list[lamina.Cache](), torch.tensor([[8, 1], [9, 2]])
    run = begin(model, pool=pool)
    run.on_token = lambda row, token, reason: forks.append(run.cache.fork())
    assert decode_captured(run).tokens == decode_plain(begin(model)).tokens
    for fork in forks[::2]:
        prompt, apart = from_rows(fork.tokens), model.new_cache(2)
        logits = model(prompt.ids, cache=apart, counts=prompt.counts, logits="last")
        assert logits is not None and fork.logits is not None
        torch.testing.assert_close(fork.logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids, cache=fork), model(ids, cache=apart), rtol=1e-4, atol=1e-4)
    pool.check()


def test_a_fork_between_reading_and_taking_in_is_not_written() -> None:
    model = small("gemma2")
    pool = lamina.Pool(model, page=4)
    cache, plain, ids = start(model, pool=pool)[0], start(model)[0], torch.tensor([[1, 2], [3, 4]])
    before = start(model)[0]
    one = Graphs(model).pass_of(2, 2, cache)
    one.read(cache, ids)
    fork = cache.fork()
    one.commit([2, 1])
    plainly(model, plain, ids, [2, 2], [2, 1])
    same(cache, plain)
    for paged, other in ((cache, plain), (fork, before)):
        torch.testing.assert_close(model(ids, cache=paged), model(ids, cache=other), rtol=1e-4, atol=1e-4)
