"""Grad modes, threads and copies: what a program around a model may do with a cache between passes, or inside one."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lamina import bridge
from lamina.errors import InputError
from tests.bridge.models import ids, model

SPLIT = [4, 1, 1, 1, 1]


def trained() -> Any:
    """A model whose last layer learns how it asks, and not what is stored."""
    one = copy.deepcopy(model("llama"))
    for name, weight in one.named_parameters():
        weight.requires_grad_("layers.3.self_attn.q_proj" in name)
    return one


def loss(one: Any, cache: Any) -> Tensor:
    """Of several passes together."""
    passes = ids(1, 8)[0].split(SPLIT, dim=1)
    return sum(one(given, past_key_values=cache).logits.logsumexp(-1).sum() for given in passes)


def gradient(make: Any) -> Tensor:
    one = trained()
    loss(one, make(one)).backward()
    return one.model.layers[3].self_attn.q_proj.weight.grad


@pytest.mark.parametrize("capacity", [None, 20])
def test_gradients_go_through_several_passes(capacity: int | None) -> None:
    expected = gradient(lambda one: transformers.DynamicCache(config=one.config))
    torch.testing.assert_close(gradient(lambda one: bridge.Cache(one, capacity=capacity)), expected)


@pytest.mark.parametrize("verb", ["crop", "crop of a pass that the Lamina cache knows", "reset"])
def test_a_gradient_through_tokens_that_were_written_again_is_refused(verb: str) -> None:
    one = trained()
    cache = bridge.Cache(one)
    held = loss(one, cache)
    if verb == "reset":
        cache.reset()
    else:
        assert verb == "crop" or cache.layers[0].keys is not None
        cache.crop(-2)
    one(ids(1, 1)[0], past_key_values=cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.backward()


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_may_begin_or_end_between_two_layers(first: bool) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=8)
    theirs, ours = transformers.DynamicCache(config=config), bridge.Cache(config)
    with torch.inference_mode():
        new = torch.randn(9, 2, 2, 1, 2, 1, 4)
    for at, layers in enumerate(new):
        for i, (k, v) in enumerate(layers):
            with torch.inference_mode(first is (i == 0) or at < 5), torch.no_grad():
                expected, found = theirs.update(k, v, i), ours.update(k, v, i)
                assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_two_threads_decode_over_a_cache_each(name: str) -> None:
    one = model(name)

    def run(given: Tensor) -> Tensor:
        return one.generate(given, past_key_values=bridge.Cache(one), do_sample=False, max_new_tokens=12)

    rows = list(ids(2)[0].split(1))
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(run, rows))
    assert all(torch.equal(found, run(given)) for found, given in zip(together, rows, strict=True))


@torch.no_grad()
def test_a_cache_that_one_thread_filled_in_inference_mode_goes_on_in_another() -> None:
    given, one = ids(1, 12)[0], model("llama")
    cache = bridge.Cache(one)

    def feed(ids: Tensor) -> Tensor:
        return torch.cat([one(x, past_key_values=cache).logits for x in ids.split(1, dim=1)], dim=1)

    with ThreadPoolExecutor(1) as thread:
        before = thread.submit(torch.inference_mode()(feed), given[:, :7]).result()
    expected = one(given, use_cache=False).logits
    torch.testing.assert_close(torch.cat([before, feed(given[:, 7:])], dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
@torch.no_grad()
def test_a_cache_is_not_pickled_and_a_shallow_copy_shares_what_is_stored(name: str) -> None:
    cache = bridge.Cache(model(name))
    for given in ids(1, 8)[0].split(SPLIT, dim=1):
        model(name)(given, past_key_values=cache)
    with pytest.raises(InputError, match=r"cannot be pickled.*cache\.save\(path\).*cache\.fork\(\)"):
        pickle.dumps(cache)
    assert copy.copy(cache).store is cache.store and copy.deepcopy(cache).store is not cache.store
