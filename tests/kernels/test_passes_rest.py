"""What is left of a prompt goes through captured passes, where it is little, and gives what a plain pass gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.generation.feed import feed_rest, prefill
from lamina.generation.prompt import from_rows
from lamina.runtime import CapturedPass
from tests.kernels.passes import same
from tests.kernels.runs import small

pytestmark = pytest.mark.usefixtures("few_programs", "passes_by_kernels")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each captured pass reads, where two are the most."""
    monkeypatch.setattr("lamina.generation.feed.most_tokens", lambda rows: 2)
    tokens: list[int] = []
    read = CapturedPass.read

    def counted(self: CapturedPass, cache: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        tokens.append(ids.shape[1])
        return read(self, cache, ids, *rest)

    monkeypatch.setattr(CapturedPass, "read", counted)
    return tokens


@pytest.mark.parametrize("family", ["gemma2", "mamba2"])
@pytest.mark.parametrize(
    ("rest", "passes"), [([[4], [8]], [1]), ([[4, 5, 6], []], [2, 1])], ids=["one pass", "two passes, one row has all"]
)
def test_a_short_rest_is_read_by_captured_passes(
    family: str, rest: list[list[int]], passes: list[int], reads: list[int]
) -> None:
    model = small(family)
    fast, slow = model.new_cache(2), model.new_cache(2)
    for cache in (fast, slow):
        prefill(model, from_rows([[5, 9, 12], [7]]), cache)
    logits = feed_rest(model, rest, fast)
    assert reads == passes
    torch.testing.assert_close(logits, prefill(model, from_rows(rest, allow_empty=True), slow), rtol=1e-4, atol=1e-4)
    same(fast, slow)


def test_a_long_rest_is_read_by_one_plain_pass(reads: list[int]) -> None:
    model = small("llama")
    cache = model.new_cache()
    feed_rest(model, [[3] * 9], cache)
    assert reads == [] and cache.tokens == [[3] * 9]
