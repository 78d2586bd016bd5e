"""What the common cases cannot show of families with experts: load balancing, extra layers, whole checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4Config, Llama4ForConditionalGeneration
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import lamina
from lamina import CheckpointError
from lamina.weights import packed_formats
from tests.families.cases import deepseek_v3, llama4
from tests.families.harness import TOLERANCE, random_ids, relative, truth


def save_deepseek(folder: Path) -> AutoModelForCausalLM:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(deepseek_v3.make(), dtype=torch.float32).eval()
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.2)
    theirs.save_pretrained(folder)
    return theirs


def test_the_balancing_bias_of_a_router_has_a_say_in_the_choice_alone(tmp_path: Path) -> None:
    theirs = save_deepseek(tmp_path)
    ours = lamina.load(tmp_path, device="cpu")
    ids = random_ids(2, 30, ours.vocab)
    assert relative(ours(ids), truth(theirs, ids)) < TOLERANCE
    for block in list(ours.blocks)[1:]:
        block.mlp.router.bias.zero_()
    assert relative(ours(ids), truth(theirs, ids)) > 10 * TOLERANCE


def test_layers_that_guess_further_tokens_are_left_out_and_no_others(tmp_path: Path) -> None:
    theirs = save_deepseek(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(32, 64)}, file)
    ours = lamina.load(tmp_path, device="cpu")
    ids = random_ids(1, 9, ours.vocab)
    assert relative(ours(ids), truth(theirs, ids)) < TOLERANCE
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(32, 64)}, file)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.2\.eh_proj\.weight"):
        lamina.load(tmp_path, device="cpu")


def test_the_router_of_a_half_precision_model_stays_in_float32(tmp_path: Path) -> None:
    save_deepseek(tmp_path)
    ours = lamina.load(tmp_path, dtype=torch.bfloat16, device="cpu")
    router = ours.blocks[1].mlp.router
    assert (router.weight.dtype, router.bias.dtype) == (torch.float32, torch.float32)
    assert ours(random_ids(1, 9, ours.vocab)).dtype == torch.bfloat16


def test_the_text_part_of_a_checkpoint_that_reads_images_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sight = dict(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=8, patch_size=4,
        vision_output_dim=16, projector_input_dim=16, projector_output_dim=16,
    )  # fmt: skip
    config = Llama4Config(text_config=llama4.make().to_dict(), vision_config=sight)
    theirs = Llama4ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = lamina.load(tmp_path, device="cpu")
    ids = random_ids(2, 30, ours.vocab)
    assert relative(ours(ids), truth(theirs, ids)) < TOLERANCE


def test_experts_stored_in_mxfp4_stay_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"],
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    packed: dict[str, torch.Tensor] = {}
    for name, parameter in theirs.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, _, out = parameter.shape
            blocks = torch.randint(0, 256, (experts, out, 1, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, (experts, out, 1), dtype=torch.uint8)
            parameter.data.copy_(convert_moe_packed_tensors(blocks, scales))
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    theirs.save_pretrained(tmp_path)
    tensors = {
        name: t for name, t in load_file(tmp_path / "model.safetensors").items() if f"{name}_blocks" not in packed
    }
    save_file(tensors | packed, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours = lamina.load(tmp_path, device="cpu", activations="float32")
    ids = random_ids(1, 9, ours.vocab)
    assert packed_formats(ours) == {"MXFP4": 2}
    plain = lamina.load(tmp_path, device="cpu", weights="plain")
    assert len(packed) == 4 and all(relative(one(ids), truth(theirs, ids)) < TOLERANCE for one in (ours, plain))
