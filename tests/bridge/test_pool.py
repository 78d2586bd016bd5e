"""Caches of transformers models in the pages of a `lamina.bridge.Pool`."""

from __future__ import annotations

import pytest
import torch
import transformers

from lamina import bridge
from lamina.errors import CapacityError, InputError
from tests.bridge.models import ids, model


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1"])
def test_tokens_are_those_of_its_own_cache(name: str, beams: int) -> None:
    given, mask = ids()
    caches = [transformers.DynamicCache(config=model(name).config)]
    caches.append(bridge.Cache(model(name), pool=bridge.Pool(tokens=512, rows=8, page=4)))
    made = [
        model(name).generate(
            given, attention_mask=mask, past_key_values=one, num_beams=beams, do_sample=False, max_new_tokens=9
        )
        for one in caches
    ]
    assert torch.equal(*made)


@torch.inference_mode()
def test_a_fork_shares_the_pages_and_goes_its_own_way() -> None:
    one, pool = model("llama"), bridge.Pool(tokens=256, page=4)
    cache = bridge.Cache(one, pool=pool)
    one(ids(1, 12)[0], past_key_values=cache)
    before = cache.inner.lengths.tolist(), pool.inner.used
    forks = [cache.fork() for _ in range(5)]
    assert (cache.inner.lengths.tolist(), pool.inner.used) == before
    a, b = torch.tensor([[5]]), torch.tensor([[6]])
    first = one(a, past_key_values=forks[0]).logits
    second = one(b, past_key_values=forks[1]).logits
    for new, found in ((a, first), (b, second)):
        whole = one(torch.cat([ids(1, 12)[0], new], dim=1), use_cache=False).logits[:, -1:]
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 12


@torch.inference_mode()
def test_a_pool_that_is_full_raises_and_says_so() -> None:
    one = model("llama")
    cache = bridge.Cache(one, pool=bridge.Pool(tokens=16, page=4))
    one(ids(1, 12)[0], past_key_values=cache)
    with pytest.raises(CapacityError, match="page"):
        for _ in range(9):
            one(torch.tensor([[5]]), past_key_values=cache)


@torch.inference_mode()
def test_a_pool_of_another_model_is_refused() -> None:
    pool = bridge.Pool(tokens=64)
    one = bridge.Cache(model("llama"), pool=pool)
    model("llama")(ids(1)[0], past_key_values=one)
    assert one.inner.lengths.tolist() == [9]
    other = bridge.Cache(model("gemma3"), pool=pool)
    model("gemma3")(ids(1)[0], past_key_values=other)
    with pytest.raises(InputError, match="another model"):
        _ = other.inner
