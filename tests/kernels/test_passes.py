"""Captured passes of every family give what plain ones give: logits, and the cache after some tokens were accepted."""

from __future__ import annotations

import pytest
import torch

from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.kernels.passes import compared
from tests.kernels.runs import PROMPTS, start

EXPERTS = ("deepseek_v3", "llama4", "qwen3_next")
pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.mark.parametrize(("family", "name"), FIRST)
def test_captured_and_plain_passes_give_the_same_whatever_is_accepted(family: str, name: str) -> None:
    model = pair(family, name)[1]
    captured, plain = start(model)[0], start(model)[0]
    if family in EXPERTS:  # whose kernels take long in the interpreter
        compared(model, captured.select([0]), plain.select([0]), (2,))
        return
    compared(model, captured, plain, (3,))
    assert [len(row) for row in captured.tokens] != [len(row) for row in PROMPTS]
    more = torch.tensor([[1, 2], [3, 4]])  # and plain passes go on from it
    torch.testing.assert_close(model(more, cache=captured), model(more, cache=plain), rtol=1e-4, atol=1e-4)
