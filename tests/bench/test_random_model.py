from __future__ import annotations

import pytest
import torch

from lamina.bench.decode import run_steps
from lamina.bench.random_model import random_model
from lamina.planning.context import fill_context, set_clock
from tests.bench.small import NAMES, small

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


@pytest.mark.parametrize("name", NAMES)
def test_random_weights_give_finite_logits_and_the_same_seed_the_same(name: str) -> None:
    model = random_model(small(name), torch.float32, "cpu")
    logits = model(IDS)
    assert logits is not None and torch.isfinite(logits).all() and logits.std() > 0.01
    again = random_model(small(name), torch.float32, "cpu")(IDS)
    assert again is not None and torch.equal(logits, again)


def test_parameters_get_the_dtype_that_loading_would_give_them() -> None:
    model = random_model(small("falcon-h1-7b"), torch.bfloat16, "cpu")
    dtypes = {name.rpartition(".")[2]: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes["A"] == dtypes["dt_bias"] == torch.float32
    assert model.dtype == torch.bfloat16


def test_a_tied_head_stays_tied() -> None:
    model = random_model(small("smollm2-135m"), torch.float32, "cpu")
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")


@pytest.mark.parametrize("name", NAMES)
def test_a_filled_cache_holds_its_context_and_decodes_on(name: str) -> None:
    model = random_model(small(name), torch.float32, "cpu")
    cache = fill_context(model.new_cache(rows=2), 40)
    assert cache.lengths.tolist() == [40, 40]
    run_steps(model, cache.poison(), torch.tensor([1, 2]), 3)  # every slot that is read has been filled
    assert cache.lengths.tolist() == cache.clock.sync() == [43, 43]
    assert cache.logits is not None and torch.isfinite(cache.logits).all()


def test_setting_the_clock_back_decodes_the_same_again() -> None:
    model = random_model(small("llama-3.1-8b"), torch.float32, "cpu")
    cache = fill_context(model.new_cache(rows=2).reserve(50), 40)
    first = run_steps(model, cache, torch.tensor([1, 2]), 5)
    set_clock(cache, 40)
    assert torch.equal(first, run_steps(model, cache, torch.tensor([1, 2]), 5))


def test_steps_choose_the_tokens_that_generate_chooses() -> None:
    model = random_model(small("gemma-2-9b"), torch.float32, "cpu")
    made = model.generate([[3, 4, 5], [6, 7, 8]], max_new_tokens=12, eos_token_id=())
    cache = model.new_cache(rows=2)
    logits = model(torch.tensor([[3, 4, 5], [6, 7, 8]]), cache=cache, logits="last")
    assert logits is not None
    last = run_steps(model, cache, logits.argmax(-1), 11)
    assert last.tolist() == [row[-1] for row in made.tokens]
