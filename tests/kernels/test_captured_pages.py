"""Captured steps and passes over pages of a pool: what caches with memory of their own give, and pages come and go."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

import lamina
from lamina.errors import PagesError
from lamina.generation.out_of_room import output_so_far
from lamina.generation.stopping import Stopping
from lamina.generation.strategies.captured import decode_captured
from lamina.generation.strategies.plain import decode_plain
from lamina.generation.strategies.speculation import speculate
from lamina.sampling.chooser import Chooser
from tests.generation.drafted import Oracle, again
from tests.kernels.passes import compared
from tests.kernels.runs import PROMPTS, begin, small, start, tiny

pytestmark = pytest.mark.usefixtures("few_programs", "passes_by_kernels")


def given_back(pool: lamina.Pool) -> None:
    gc.collect()
    assert pool.check().used == 0


def held(cache: lamina.Cache) -> int:
    """The pages that the lengths of the rows ask for."""
    assert cache.pages is not None
    tables = cache.pages.tables
    slots = {layout: [min(n, layout.most or n) for n in cache.clock.sync()] for layout in tables}
    return sum(-(-n // tables[layout].group.page) for layout, rows in slots.items() for n in rows)


CASES = [
    ("llama", None),
    ("gemma2", None),
    ("falcon_h1", None),
    ("deepseek_v3", None),
    ("glm_moe_dsa", None),
    ("gemma2", "int8"),
]


@pytest.mark.parametrize(("family", "codec"), CASES)
def test_a_captured_step_over_pages_makes_the_tokens_of_plain_passes(family: str, codec: str | None) -> None:
    model = small(family)
    pool = lamina.Pool(model, tokens=64, page=4, codec=codec)
    found, expected = decode_captured(begin(model, pool=pool)), decode_plain(begin(model, codec=codec))
    assert found.tokens == expected.tokens and found.cache.tokens == expected.cache.tokens
    assert pool.check().used == held(found.cache)  # what was given ahead is given back
    found.cache.poison()
    more = torch.tensor([[1, 2], [3, 4]])  # and plain passes go on from it
    torch.testing.assert_close(model(more, cache=found.cache), model(more, cache=expected.cache), rtol=1e-4, atol=1e-4)
    del found
    given_back(pool)


@pytest.mark.parametrize(("family", "codec"), [("gemma2", None), ("deepseek_v3", None), ("falcon_h1", "k8v4")])
def test_captured_passes_read_pages_and_take_accepted_tokens_in(family: str, codec: str | None) -> None:
    model = small(family)
    pool = lamina.Pool(model, tokens=96, page=4, codec=codec)
    cache = start(model, pool=pool)[0]
    compared(model, cache, start(model, codec=codec)[0], (2, 3, 1))
    pool.check()


def test_running_out_of_pages_in_the_middle_loses_nothing() -> None:
    model = tiny()
    expected = decode_plain(begin(model, max_new_tokens=12)).tokens
    pool = lamina.Pool(model, tokens=10 * 4, page=4)
    other = start(model, pool=pool)[0]  # has 4 pages; 6 are left for rows of 11 and 1 tokens
    run = begin(model, pool=pool, max_new_tokens=12)
    with pytest.raises(PagesError, match="Nothing was changed"):
        decode_captured(run)
    made = [row[len(prompt) :] for row, prompt in zip(run.cache.tokens, PROMPTS, strict=True)]
    assert made == [row[:5] for row in expected]  # 16 and 6 tokens: the next one of row 0 needs another page
    partial = output_so_far(run, PagesError("none"))  # as generate gives it with the error
    assert (partial.tokens, partial.reasons) == (made, ["pages", "pages"])
    other.release()
    assert pool.check().used == held(run.cache) and run.cache.logits is not None
    rest = decode_captured(replace(run, logits=run.cache.logits.clone(), stopping=Stopping([7, 7], ())))
    assert rest.tokens == [row[5:] for row in expected]


def test_captured_steps_get_the_pages_of_snapshots() -> None:
    model = tiny()
    expected = decode_plain(begin(model, max_new_tokens=12)).tokens
    pool = lamina.Pool(model, tokens=10 * 4, page=4)
    store = lamina.PrefixStore(model, 2**30, pool=pool)
    store._keep_rows(start(model, pool=pool)[0])  # 4 pages; 6 are left for rows that come to 23 and 13 tokens
    assert len(store) == 2 and pool.used == 4
    found = decode_captured(begin(model, pool=pool, max_new_tokens=12))
    assert found.tokens == expected
    assert len(store) == 0
    pool.check()


def test_a_row_that_ends_before_it_needs_another_page_runs_out_of_none() -> None:
    model = tiny()
    free = decode_plain(begin(model, max_new_tokens=12)).tokens
    ends = [row[2] for row in free]
    expected = decode_plain(begin(model, max_new_tokens=12, eos_token_id=ends)).tokens
    pages = sum(-(-(len(prompt) + len(row)) // 4) for prompt, row in zip(PROMPTS, expected, strict=True))
    pool = lamina.Pool(model, tokens=4 * pages, page=4)
    assert decode_captured(begin(model, pool=pool, max_new_tokens=12, eos_token_id=ends)).tokens == expected
    pool.check()


def test_no_captured_step_keeps_a_cache_and_its_pages() -> None:
    model = tiny()
    pool = lamina.Pool(model, page=4)
    cache = start(model, pool=pool)[0]
    step = model.graphs.step(2, Chooser(), cache)
    step.begin(cache, torch.tensor([1, 2]), [1, 1], ())
    step.run(1)
    one = model.graphs.pass_of(2, 1, cache)
    one.read(cache, torch.tensor([[1], [2]]))
    one.commit()
    del cache
    given_back(pool)


def test_speculation_runs_on_pages() -> None:
    model = small("gemma2")
    pool = lamina.Pool(model, tokens=200, page=4)
    run, plain = begin(model, pool=pool, max_new_tokens=4), begin(model, max_new_tokens=4)
    truth = decode_plain(again(plain))
    found = speculate(again(run, num_assistant_tokens=3), Oracle(plain, truth, 0.7, 0))
    assert found.tokens == truth.tokens and found.how == "captured passes of several tokens"
    assert found.cache.tokens == truth.cache.tokens and run.cache.tokens == PROMPTS
    pool.check()
