"""`activations="float32"`: a native step over packed weights gives what the dequantized model gives."""

from __future__ import annotations

import pytest
import torch

import lamina
from lamina.errors import InputError
from tests.weights.test_families import CONFIGS, IDS, dequantized, packed_model


@pytest.mark.parametrize("kind", ["dense", "mixture", "recurrent"])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_float32_steps_have_the_tokens_and_logits_of_the_dequantized_model(kind: str, weights: str) -> None:
    assert kind in CONFIGS
    model = packed_model(kind, weights)
    model.activations = "float32"
    found, wanted = (one.generate(IDS, 16, eos_token_id=()) for one in (model, dequantized(model)))
    assert found.how.startswith("one native program a step")
    assert found.tokens == wanted.tokens
    torch.testing.assert_close(found.cache.logits, wanted.cache.logits, rtol=1e-4, atol=1e-4)


def test_a_step_is_recorded_again_when_activations_change() -> None:
    model = packed_model("dense")
    rounded = model.generate(IDS, 8, eos_token_id=()).cache.logits.clone()
    model.activations = "float32"
    found = model.generate(IDS, 8, eos_token_id=()).cache.logits
    wanted = dequantized(model).generate(IDS, 8, eos_token_id=()).cache.logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(rounded, wanted, rtol=1e-5, atol=1e-5)


def test_the_demo_model_has_the_tokens_of_its_dequantized_weights_over_64_steps() -> None:
    packed = lamina.load("smollm2", device="cpu", activations="float32")
    plain = lamina.load("smollm2", device="cpu", weights="plain")
    assert "native kernels with float32 activations" in packed.explain()
    text = "Once upon a time, in a village by the sea, there lived an old fisherman who"
    found, wanted = (model.generate(text, 64, eos_token_id=()) for model in (packed, plain))
    assert found.how.startswith("one native program a step")
    assert found.tokens == wanted.tokens


def test_other_activations_are_refused() -> None:
    with pytest.raises(InputError, match="activations='int4' must be one of 'int8', 'float32'"):
        lamina.load("smollm2", device="cpu", activations="int4")
