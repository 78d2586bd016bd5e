"""Assisted decoding over our caches gives the greedy tokens, for windows and states too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina import bridge
from tests.bridge.models import ids, model

NAMES = ["llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3", "lfm2"]
KEPT: dict[str, dict[str, Any]] = {"grows": {}, "fixed": {"capacity": 40}, "int8": {"codec": "int8"}}


def generate(name: str, cache: Any, **settings: Any) -> torch.Tensor:
    return model(name).generate(
        ids(1)[0], past_key_values=cache, do_sample=False, max_new_tokens=12, **settings
    )  # fmt: skip


@pytest.mark.parametrize("assistant", ["another", "itself"])
@pytest.mark.parametrize("name", NAMES)
def test_an_assistant_gives_the_greedy_tokens(name: str, assistant: str) -> None:
    """`itself` has every draft accepted, `another` almost none."""
    for kept in ("grows", "fixed"):
        drafts = model(name, seed=int(assistant == "another"))
        ours = generate(name, bridge.Cache(model(name), **KEPT[kept]), assistant_model=drafts)
        assert torch.equal(generate(name, None), ours), kept


def test_an_assistant_over_codes_gives_the_greedy_tokens_over_codes() -> None:
    greedy = generate("gemma3", bridge.Cache(model("gemma3"), codec="int8"))
    cache = bridge.Cache(model("gemma3"), codec="int8")
    assert torch.equal(greedy, generate("gemma3", cache, assistant_model=model("gemma3", seed=1)))
