from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

from lamina.bench import SHAPES, find_shape
from lamina.config import Config
from lamina.errors import InputError
from lamina.models import family, known_types

SIZES = {
    "llama-3.1-8b": 8.03e9, "gemma-2-9b": 9.24e9, "mamba2-2.7b": 2.70e9, "falcon-h1-7b": 7.59e9,
    "qwen3-next": 21.65e9, "deepseek-v2-lite": 15.71e9, "smollm2-135m": 0.1345e9, "mistral-7b": 7.248e9,
    "qwen3-8b": 8.19e9, "gemma-3-12b": 11.77e9, "qwen3-30b-a3b": 30.53e9, "gpt-oss-20b": 20.91e9,
    "nemotron-h-8b": 8.10e9, "granite-4.0-h-small": 32.2e9, "recurrentgemma-9b": 8.58e9, "falcon-mamba-7b": 7.27e9,
    "mamba-2.8b": 2.768e9, "whisper-large-v3": 1.543e9,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name].config["model_type"] in known_types()])
def test_a_shape_has_the_size_of_the_model_it_is_named_after_here_and_in_transformers(name: str) -> None:
    config = dict(SHAPES[name].config)
    with torch.device("meta"):
        ours = family(config["model_type"]).build(Config(config))
        speech = config["model_type"] == "whisper"
        auto = AutoModelForSpeechSeq2Seq if speech else AutoModelForCausalLM
        theirs = auto.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    numbers = sum(parameter.numel() for parameter in ours.parameters())
    assert numbers == pytest.approx(SIZES[name], rel=2e-3)
    # Whisper's keys have no bias; ours are zero
    assert numbers == pytest.approx(
        sum(parameter.numel() for parameter in theirs.parameters()), rel=1e-4 if speech else 1e-6
    )


def test_a_shape_can_be_a_configuration_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "mine.json").write_text(json.dumps({"model_type": "llama"}))
    assert find_shape(str(tmp_path)).name == tmp_path.name
    assert find_shape(str(tmp_path / "mine.json")).name == "mine"


def test_an_unknown_shape_is_told_with_those_that_are_known() -> None:
    with pytest.raises(
        InputError, match=r"llama-9 is neither a .*folder with config.json, .* one of smollm2, .*llama-3.1-8b"
    ):
        find_shape("llama-9")
