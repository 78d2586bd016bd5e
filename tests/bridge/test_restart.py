"""`generate` goes on with our cache as with transformers' own: with all ids, with new ids alone, with embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lamina import bridge
from tests.bridge.models import ids, model

NAMES = ["llama", "mistral", "gemma3", "falcon_h1", "lfm2", "qwen3_next", "deepseek_v3", "gpt_oss"]
KEPT: dict[str, dict[str, Any]] = {"grows": {}, "fixed": {"capacity": 60}}
MORE = torch.tensor([[7, 8, 9, 10, 11]])


def both(name: str, **kept: Any) -> list[Any]:
    return [transformers.DynamicCache(config=model(name).config), bridge.Cache(model(name), **kept)]


def generate(name: str, cache: Any, **given: Any) -> torch.Tensor:
    settings = dict(do_sample=False, max_new_tokens=6, use_cache=True)
    return model(name).generate(past_key_values=cache, **settings, **given)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_with_all_ids_gives_the_tokens_of_its_own_cache(name: str, kept: str) -> None:
    made = []
    for cache in both(name, **KEPT[kept]):
        first = generate(name, cache, input_ids=ids(1)[0])
        made.append(generate(name, cache, input_ids=torch.cat([first, MORE], dim=1)))
    assert torch.equal(*made)
    alone = generate(name, None, input_ids=torch.cat([first, MORE], dim=1))
    assert torch.equal(made[1], alone)


@pytest.mark.parametrize("name", NAMES)
def test_new_ids_with_the_whole_mask_give_the_tokens_of_its_own_cache(name: str) -> None:
    made = []
    for cache in both(name):
        first = generate(name, cache, input_ids=ids(1)[0])
        new = torch.cat([first[:, -1:], MORE], dim=1)  # the last token was made, and not fed yet
        mask = torch.ones((1, first.shape[1] + MORE.shape[1]), dtype=torch.long)
        made.append(generate(name, cache, input_ids=new, attention_mask=mask))
    assert torch.equal(*made)


@pytest.mark.parametrize("name", ["jamba", *(name for name in NAMES if name != "falcon_h1")])  # it takes ids alone
def test_embeddings_give_the_tokens_of_its_own_cache_and_go_on(name: str) -> None:
    embed, made = model(name).get_input_embeddings(), []
    for cache in both(name):
        start = ids(1)[0]
        first = generate(name, cache, inputs_embeds=embed(start))
        whole = torch.cat([start, first, MORE], dim=1)
        made.append((first, generate(name, cache, inputs_embeds=embed(whole))))
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


def test_padded_rows_go_on_past_the_window() -> None:
    made = []
    for cache in both("gemma3"):
        given, mask = ids(2)
        first = generate("gemma3", cache, input_ids=given, attention_mask=mask)
        whole = torch.cat([first, MORE.expand(2, -1)], dim=1)
        mask = torch.cat([mask, torch.ones(2, whole.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
        made.append(generate("gemma3", cache, input_ids=whole, attention_mask=mask))
    assert torch.equal(*made)
