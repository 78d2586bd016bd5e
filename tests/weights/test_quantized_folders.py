"""Folders that other programs quantized: AWQ, GPTQ, compressed-tensors and FP8 are read, and stay packed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.checkpoint import open_source
from lamina.errors import CheckpointError
from lamina.weights import Packed, named_weights, packed_formats, weight_bytes
from tests.families.harness import relative
from tests.weights.layouts import LAYOUTS

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain")
    config = LlamaConfig(
        vocab_size=40, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantized(plain, folder, settings, encode):
    """A folder with quantized linear layers, and beside it the values that they stand for."""
    tensors = load_file(plain / "model.safetensors")
    stored, dense = {}, {}
    for i, (name, tensor) in enumerate(tensors.items()):
        if name.endswith("_proj.weight"):
            parts, dense[name] = encode(tensor, i)
            stored |= {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
        else:
            stored[name] = dense[name] = tensor
    config = json.loads((plain / "config.json").read_text())
    for place, values, more in ((folder / "q", stored, {"quantization_config": settings}), (folder / "d", dense, {})):
        place.mkdir()
        save_file(values, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config | more))
    return folder / "q", folder / "d"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_that_the_layout_stands_for(layout, plain, tmp_path):
    folder, dense = quantized(plain, tmp_path, *LAYOUTS[layout])
    packed, wanted = lamina.load(folder, device="cpu", activations="float32"), lamina.load(dense, device="cpu")
    matrices = {name: one for name, one in named_weights(packed) if isinstance(one, Packed)}
    assert len(matrices) == 8 and weight_bytes(packed) < weight_bytes(wanted) / 2
    for name, one in matrices.items():
        assert torch.allclose(one.dense(), wanted.get_parameter(name), rtol=1e-6, atol=1e-7), name
    with torch.no_grad():
        assert relative(packed(IDS), wanted(IDS)) < 1e-5
        assert relative(lamina.load(folder, device="cpu", weights="plain")(IDS), wanted(IDS)) < 1e-5
    found = lamina.inspect(folder)
    assert found.problem is None and not found.unread
    if layout != "gptq, act-order":  # where joined matrices have orders of columns of their own, as values say
        assert found.weight_bytes == weight_bytes(packed) and found.packed == packed_formats(packed)


def test_what_cannot_be_read_is_named(plain, tmp_path):
    settings, encode = LAYOUTS["gptq"]
    folder, _ = quantized(plain, tmp_path, settings, encode)
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj"

    def load(changes=None, **more):
        save_file(tensors | (changes or {}), file)
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings | more}))
        return lamina.load(folder, device="cpu")

    with pytest.raises(CheckpointError, match=r"\w+_proj\.weight has 3 bits \(gptq\); 4 and 8 bits are read"):
        load(bits=3)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is int4 \[160, 64\] with scales \[160, 3\]"):
        load({f"{name}.scales": torch.ones(3, 160), f"{name}.qzeros": torch.ones(3, 20, dtype=torch.int32)})
    with pytest.raises(
        CheckpointError, match=r"up_proj\.weight: its g_idx does not divide 64 inputs into 2 groups of eq"
    ):
        load({f"{name}.g_idx": torch.zeros(64, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight \[8, 8\], expected|expected \[320, 64\]"):
        load({f"{name}.qweight": torch.zeros(4, 160, dtype=torch.int32), f"{name}.g_idx": torch.arange(32).int() // 16})
    with pytest.raises(CheckpointError, match="with 'awq', and has no tensors of that"):
        save_file({"x.weight": torch.ones(2)}, file)
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
        open_source(folder)
    with pytest.raises(CheckpointError, match="compressed-tensors in the format 'marlin-24'; read are pack-quantized"):
        more = {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}}
        (folder / "config.json").write_text(json.dumps(config | more))
        open_source(folder)
