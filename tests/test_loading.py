"""`lamina.load` and `lamina.verify` at the door: what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import lamina
from tests.families.cases.llama import make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(make()).save_pretrained(tmp_path)
    return tmp_path


def change(checkpoint: Path, **values: object) -> Path:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return checkpoint


def test_a_checkpoint_without_a_tokenizer_has_none(checkpoint: Path) -> None:
    model = lamina.load(checkpoint, device="cpu")
    assert model.tokenizer is None
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_dtype_is_the_checkpoints_unless_asked_for(checkpoint: Path) -> None:
    assert lamina.load(checkpoint, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16
    assert lamina.load(change(checkpoint, dtype="bfloat16"), device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["auto", "cuda:0,cuda:1", ["cpu", "cuda"], {"": 0}])
def test_several_devices_are_refused_by_name(checkpoint: Path, device: object) -> None:
    with pytest.raises(lamina.InputError, match="a model lives on one device"):
        lamina.load(checkpoint, device=device)  # type: ignore[arg-type]


def test_an_unknown_family_is_refused_with_the_known_ones(checkpoint: Path) -> None:
    with pytest.raises(lamina.InputError, match=r"model_type 'elephant' is not supported; known: deepseek_v3, .*llama"):
        lamina.load(change(checkpoint, model_type="elephant"), device="cpu")


def test_quantized_weights_are_refused_by_their_method(checkpoint: Path) -> None:
    with pytest.raises(lamina.InputError, match="quantized with 'fp8'"):
        lamina.load(change(checkpoint, quantization_config={"quant_method": "fp8"}), device="cpu")


def test_an_unknown_rotary_type_is_refused(checkpoint: Path) -> None:
    with pytest.raises(lamina.InputError, match="rotary type 'spiral' is not supported; known: default, linear"):
        lamina.load(change(checkpoint, rope_parameters={"rope_type": "spiral"}), device="cpu")
