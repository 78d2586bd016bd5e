"""A transformers model that `torch.compile` compiles reads and writes our cache as it does uncompiled."""

from __future__ import annotations

import copy

import pytest
import torch

from lamina import bridge
from tests.bridge.models import cache_argument, ids, model


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1"])
@torch.no_grad()
def test_a_compiled_model_gives_the_logits_of_one_uncached_pass(name: str) -> None:
    torch.compiler.reset()
    given = ids(1, 8)[0]
    one = copy.deepcopy(model(name))
    compiled, argument = torch.compile(one, backend="eager"), {cache_argument(name): bridge.Cache(one)}
    passes = [compiled(x, **argument).logits for x in given.split([5, 1, 1, 1], dim=1)]
    torch.compiler.reset()
    expected = model(name)(given, use_cache=False).logits
    torch.testing.assert_close(torch.cat(passes, dim=1), expected, rtol=1e-4, atol=1e-4)
