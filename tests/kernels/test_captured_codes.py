"""A captured decode step over a cache in codes gives what plain passes over such a cache give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.cache.codec.codec import Codecs
from lamina.config import Config
from lamina.generation.strategies.captured import decode_captured
from lamina.generation.strategies.plain import decode_plain
from lamina.models.llama import Llama
from lamina.runtime.eligibility import why_no_kernels
from tests.families.cases import FIRST
from tests.families.cases.llama import make
from tests.families.harness import pair
from tests.kernels.passes import compared
from tests.kernels.runs import begin, both, start, tiny

pytestmark = pytest.mark.usefixtures("few_programs")
CASES: list[tuple[str, Codecs]] = [
    ("llama", "int8"),
    ("gemma2", {"default": "k8v4", 0: "int5", 1: "plain"}),  # softcap, and rings
    ("deepseek_v3", "int4"),  # latents
    ("falcon_h1", "int6"),  # and a recurrence beside
]


@pytest.mark.parametrize(("family", "codec"), CASES, ids=str)
def test_captured_and_plain_steps_give_the_same(family: str, codec: Codecs) -> None:
    model = pair(family, dict(FIRST)[family])[1]
    captured, plain = (made.cache for made in both(model, codec=codec, max_new_tokens=1))
    assert captured.logits is not None and plain.logits is not None
    torch.testing.assert_close(captured.logits, plain.logits, rtol=1e-4, atol=1e-4)
    more = torch.tensor([[1, 2], [3, 4]])  # and plain passes go on from it
    torch.testing.assert_close(model(more, cache=captured), model(more, cache=plain), rtol=1e-4, atol=1e-4)


def test_heads_of_whole_groups_are_turned_and_back() -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    model = Llama.build(Config(make(vocab_size=50, intermediate_size=16, head_dim=64, **shape).to_dict()))
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    captured, plain = (made.cache for made in both(model, codec="int4", max_new_tokens=2))
    assert captured.logits is not None and plain.logits is not None
    torch.testing.assert_close(captured.logits, plain.logits, rtol=1e-4, atol=1e-4)


def test_each_codec_has_a_captured_step_of_its_own_and_caches_share_it() -> None:
    model = tiny()
    model.__dict__.pop("_graphs", None)
    expected = {codec: decode_plain(begin(model, codec=codec, max_new_tokens=1)).tokens for codec in ("int8", "int4")}
    for codec in ("int8", "int4", "int8", "int4"):
        assert decode_captured(begin(model, codec=codec, max_new_tokens=1)).tokens == expected[codec]
    assert model.graphs.captures == 2


@pytest.mark.parametrize(("family", "codec"), [("gemma2", "k8v4"), ("deepseek_v3", "int8")])
def test_captured_passes_of_several_tokens_read_codes_and_take_accepted_ones_in(family: str, codec: str) -> None:
    model = pair(family, dict(FIRST)[family])[1]
    compared(model, start(model, codec=codec)[0], start(model, codec=codec)[0], (3,))


def test_codecs_stand_in_the_way_of_no_captured_step() -> None:
    for family in ("llama", "deepseek_v3"):
        model = pair(family, dict(FIRST)[family])[1]
        assert why_no_kernels(model.specs, model.new_cache(codec="int4").layers) is None
