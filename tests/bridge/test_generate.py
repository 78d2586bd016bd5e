"""transformers' `generate` over our cache gives the tokens that it gives over its own, past every window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lamina import bridge
from tests.bridge.models import CONFIGS, ids, model

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "chunked prefill": {"prefill_chunk_size": 4},
}
KEPT: dict[str, dict[str, Any]] = {"grows": {}, "fixed": {"capacity": 40}, "slack": {"slack": 3}}


def generate(name: str, cache: Any, rows: int = 2, **settings: Any) -> torch.Tensor:
    given, mask = ids(rows)
    torch.manual_seed(3)
    settings = {"do_sample": False, "max_new_tokens": 14} | settings
    return model(name).generate(given, attention_mask=mask, past_key_values=cache, **settings)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_generate_gives_the_tokens_of_a_dynamic_cache(name: str, way: str, kept: str) -> None:
    theirs = generate(name, transformers.DynamicCache(config=model(name).config), **WAYS[way])
    assert torch.equal(theirs, generate(name, bridge.Cache(model(name), **KEPT[kept]), **WAYS[way]))


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", CONFIGS)
def test_prompt_lookup_gives_the_greedy_tokens(name: str, kept: str) -> None:
    greedy = generate(name, None, rows=1)
    ours = generate(name, bridge.Cache(model(name), **KEPT[kept]), rows=1, prompt_lookup_num_tokens=3)
    assert torch.equal(greedy, ours)


def test_passes_of_one_token_over_windows_need_no_pass_of_the_lamina_cache() -> None:
    one = model("gemma3")
    cache = bridge.Cache(one)
    one.generate(ids(1)[0], past_key_values=cache, do_sample=False, max_new_tokens=30)
    lines = cache.store.lines
    assert lines is not None and lines.rings and lines.length > cache.store._length
    assert cache.inner.lengths.tolist() == [lines.length] and cache.store.lines is None
    cache.store._use_lines()
    assert cache.store.lines is not None
    cache.activate_past_recording()  # from here on rings need slack, which passes of the Lamina cache make
    assert cache.store.lines is None


def test_passes_of_one_token_change_states_in_place_without_a_pass_of_the_lamina_cache() -> None:
    one = model("falcon_h1")
    cache = bridge.Cache(one)
    one.generate(ids(1)[0], past_key_values=cache, do_sample=False, max_new_tokens=30)
    lines = cache.store.lines
    assert lines is not None and lines.states and lines.length > cache.store._length
    assert cache.inner.lengths.tolist() == [lines.length] and cache.store.lines is None
