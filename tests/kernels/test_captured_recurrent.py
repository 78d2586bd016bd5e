"""A captured decode step of recurrent families gives what plain passes give, and so does a pass of several tokens."""

from __future__ import annotations

import pytest
import torch

from tests.families.harness import pair
from tests.kernels.passes import compared
from tests.kernels.runs import both

FAMILIES = [
    ("falcon_mamba", "typical"),
    ("recurrent_gemma", "two recurrent, one sliding"),
    ("rwkv", "typical"),
    ("kimi_linear", "tied, all layers dense, low-rank queries"),
]
pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_captured_and_plain_steps_give_the_same(family: str, name: str) -> None:
    model = pair(family, name)[1]
    captured, plain = (made.cache for made in both(model, max_new_tokens=2))
    assert captured.logits is not None and plain.logits is not None
    torch.testing.assert_close(captured.logits, plain.logits, rtol=1e-4, atol=1e-4)
    more = torch.tensor([[1, 2], [3, 4]])  # and plain passes go on from it
    torch.testing.assert_close(model(more, cache=captured), model(more, cache=plain), rtol=1e-4, atol=1e-4)
    compared(model, captured, plain, (3,))
