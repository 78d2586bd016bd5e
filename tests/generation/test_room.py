"""Memory is made for tokens that come soon, and grows with those that come: max_new_tokens costs nothing by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lamina
from lamina.cache.layers.base import grown
from lamina.cache.summary import lines
from lamina.errors import CapacityError
from lamina.generation import room
from lamina.generation.room import INITIAL_NEW
from lamina.generation.strategies import contrastive
from lamina.rehearsal.meter import AllocationMeter
from tests.generation.rows import PROMPTS, every_family, held, made, model_of
from tests.generation.test_context import STRATEGIES
from tests.laws.toys import toy
from tests.planning.models import config, model

MOST = 2_000_000


@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_that_are_never_made_take_no_memory(name: str) -> None:
    model, settings = model_of("llama"), STRATEGIES[name] | dict(beyond_context=True)
    taken = {}
    for most in (INITIAL_NEW, MOST):
        with AllocationMeter() as counted:
            result = made(model, PROMPTS, most, stop=lambda row, tokens, text: len(tokens) == 3, **settings)
        assert result.reasons == ["stop"] * len(result.tokens) and len(result.tokens[0]) == 3
        taken[most] = counted.most
    assert taken[MOST] < 1.05 * taken[INITIAL_NEW]  # garbage that Python has not collected yet aside


def test_a_prefix_store_a_pool_and_a_continued_cache_take_none_either() -> None:
    model = model_of("llama")
    store, pool = lamina.PrefixStore(model, bytes=2**24), lamina.Pool(model, page=8)

    def run(most: int, **given: Any) -> None:
        made(model, PROMPTS, most, beyond_context=True, stop=lambda row, tokens, text: len(tokens) == 2, **given)

    run(4, prefixes=store)
    for given in (
        lambda: dict(prefixes=store), lambda: dict(cache=model.new_cache(3, pool=pool)),
        lambda: dict(cache=held("llama")), lambda: dict(cache=model.new_cache(3, residence="host")),
    ):  # fmt: skip
        taken = []
        for most in (INITIAL_NEW, MOST):
            with AllocationMeter() as counted:
                run(most, **given())
            taken.append(counted.most)
        assert taken[1] < 1.05 * taken[0]


@every_family
def test_a_cache_that_grows_in_the_middle_gives_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = model_of(family), made(model_of(family), PROMPTS, 30)
    monkeypatch.setattr(room, "INITIAL_NEW", 5)
    result = made(model, PROMPTS, 30)
    assert result.tokens == expected.tokens and result.cache.tokens == expected.cache.tokens
    assert lines(result.cache) == lines(expected.cache)  # it grew to what was asked for, and no further


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_grows_its_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = model_of("llama"), STRATEGIES[name]
    expected = made(model, PROMPTS, 28, **settings)
    monkeypatch.setattr(room, "INITIAL_NEW", 3)
    assert made(model, PROMPTS, 28, **settings).tokens == expected.tokens


def test_growth_doubles_and_stops_at_what_is_expected() -> None:
    cache = toy("full").new_cache().reserve(40, most=150)
    slots = [cache.layers[0]["attention"].slots]
    for _ in range(160):
        toy("full")(torch.tensor([[1]]), cache=cache)
        slots.append(cache.layers[0]["attention"].slots)
    assert list(dict.fromkeys(slots)) == [40, 80, 150, 300]
    assert cache.record.shape[1] == 300
    with pytest.raises(CapacityError, match="cannot reserve 30 tokens: the capacity is 20"):
        toy("full").new_cache(capacity=20).reserve(5, most=30)
    assert [grown(512, 513, n) for n in (None, 600, 2000)] == [1024, 600, 1024]


def test_contrastive_search_keeps_as_many_directions_as_there_are_tokens() -> None:
    context = contrastive.PastStates(torch.randn(2, 3, 4), [3, 1])
    for n in range(9):
        context.add(torch.randn(2, 4))
        assert context.lengths.tolist() == [4 + n, 2 + n] and context.states.shape[1] <= 2 * (4 + n)


@pytest.mark.parametrize(("family", "prompt", "new"), [("llama", 5, 40), ("gemma2", 5, 40), ("falcon_h1", 20, 3)])
def test_a_plan_is_what_generate_leaves(family: str, prompt: int, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, ids = model(family), [[7] * prompt] * 2
    for soon in (8, INITIAL_NEW):
        monkeypatch.setattr(room, "INITIAL_NEW", soon)
        for where in ("device", "host"):
            cache = subject.generate(ids, new, eos_token_id=(), cache=subject.new_cache(2, residence=where)).cache
            plan = lamina.plan(
                config(family), rows=2, length=prompt + new, prompt=prompt, dtype=torch.bfloat16, residence=where
            )
            assert list(plan.lines) == lines(cache)
            assert (plan.growing > 0) == (soon < new and where == "device")
            reserved = {one.way: one for one in plan.rooms}["reserved"]
            assert (reserved.nbytes, reserved.host, reserved.growing) == (plan.cache, plan.host, plan.growing)


def test_a_plan_says_what_is_beyond_the_context() -> None:
    text = str(lamina.plan("smollm2-135m", length=9000))
    assert "context          9,000 tokens are beyond the 8,192 positions that the model was made for: generate" in text
    assert "beyond" not in str(lamina.plan("smollm2-135m", length=8192))
    small = config("llama") | {"max_position_embeddings": 512}
    assert lamina.plan(small).use.length == 512  # not more than the model has, where nobody says
