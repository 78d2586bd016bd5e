"""A short prompt costs the host few Python calls: what a captured graph is launched behind, and what follows it."""

from __future__ import annotations

import pytest

import lamina.kernels.step_ends  # noqa: F401  defined for the interpreter, which the fixture of these tests turns off
from bench.prompt_host import host_of_generate, host_of_prefill, pretended_gpu, tiny_model
from lamina.model import Model

TOKENS = 64
SLACK = 1.05


@pytest.fixture(scope="module")
def model() -> Model:
    """Of 32 layers."""
    return tiny_model("llama-3.1-8b")


def test_generate_makes_few_python_calls_before_and_after_the_replay_of_the_prompt(model: Model) -> None:
    before, after = (share.calls for share in host_of_generate(model, TOKENS))
    assert before <= SLACK * 990 and after <= SLACK * 460


def test_a_prompt_into_a_new_cache_makes_few_python_calls(model: Model) -> None:
    before, after = (share.calls for share in host_of_prefill(model, TOKENS))
    assert before <= SLACK * 628 and after <= SLACK * 32


def test_what_is_counted_is_a_captured_prompt_and_a_captured_step(model: Model) -> None:
    with pretended_gpu():
        for _ in range(3):
            result = model.generate([[1, 2, 3]], 1, eos_token_id=())
    assert result.prompt_how == "one captured graph of up to 3 tokens a row"
    assert result.how == "one captured graph a step"
