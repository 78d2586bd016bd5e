"""What is left of a prompt goes through captured passes, where it is little, and gives what a plain pass gives."""

from __future__ import annotations

import pytest
import torch

from lamina.generation.prefill import feed_rest, prefill
from lamina.generation.prompt import from_rows
from tests.kernels.passes import same
from tests.kernels.runs import small

pytestmark = pytest.mark.usefixtures("few_programs", "passes_by_kernels")


@pytest.mark.parametrize("family", ["gemma2", "mamba2"])
@pytest.mark.parametrize("rest", [[[4], [8]], [[4, 5, 6], []]], ids=["one pass", "two passes, one row has all"])
def test_a_short_rest_is_read_by_captured_passes(
    family: str, rest: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.generation.reading.most_tokens", lambda rows: 2)
    model = small(family)
    fast, slow = model.new_cache(2), model.new_cache(2)
    for cache in (fast, slow):
        prefill(model, from_rows([[5, 9, 12], [7]]), cache)
    before = model.graphs.captures
    logits = feed_rest(model, rest, fast)
    torch.testing.assert_close(logits, prefill(model, from_rows(rest, allow_empty=True), slow), rtol=1e-4, atol=1e-4)
    same(fast, slow)
    assert model.graphs.captures > before


def test_a_long_rest_is_read_by_one_plain_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.generation.reading.most_tokens", lambda rows: 2)
    model = small("llama")
    cache, before = model.new_cache(), model.graphs.captures
    feed_rest(model, [[3] * 9], cache)
    assert model.graphs.captures == before and cache.tokens == [[3] * 9]
