"""A token over our cache costs the host about as much as over `DynamicCache`: kernels and Python calls are counted."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from lamina import bridge
from tests.bridge.models import SMALL, ids, model

CALLS = 10  # Python calls that a layer, and a pass besides its layers, may cost more than with `DynamicCache`


class Kernels(TorchDispatchMode):
    """Counts operations that compute or copy something, and not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def costs(one: Any, cache: Any) -> tuple[int, int]:
    """Kernels and Python calls of a token, once the model has decoded a few."""
    token, calls = ids(1, 1)[0], 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for given in (ids(1)[0], token, token, token):
        one(given, past_key_values=cache, use_cache=True)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        one(token, past_key_values=cache, use_cache=True)
    finally:
        sys.setprofile(before)
    with Kernels() as kernels:
        one(token, past_key_values=cache, use_cache=True)
    return kernels.count, calls


@pytest.mark.parametrize("name", ["llama", "gemma3 before its window is full", "falcon_h1"])
@torch.no_grad()
def test_a_token_costs_as_many_kernels_as_over_dynamic_cache_and_a_few_python_calls_more(name: str) -> None:
    if name in ("llama", "falcon_h1"):
        one = model(name)
    else:
        types = ["sliding_attention", "full_attention"] * 2
        one = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, layer_types=types)).eval()
    theirs = costs(one, transformers.DynamicCache(config=one.config))
    ours = costs(one, bridge.Cache(one))
    assert ours[0] <= theirs[0]
    assert ours[1] <= theirs[1] + CALLS * (one.config.num_hidden_layers + 1)
