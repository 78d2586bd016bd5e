"""`lamina quantize`: the folder is what compressed-tensors describes, our own loader reads it, the report is right."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import lamina
from lamina.checkpoint.quantized import writer
from lamina.cli import commands
from lamina.errors import InputError
from lamina.quantizing import Quality, compare, quantize_checkpoint
from lamina.weights import weight_format
from tests.checkpoint.test_gguf_tokenizer import BACKEND
from tests.families.harness import relative

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain")
    config = LlamaConfig(
        vocab_size=BACKEND.get_vocab_size(), hidden_size=96, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(BACKEND.to_str())
    return folder


@pytest.mark.parametrize("to", ["int4", "int8", "fp8"])
def test_the_folder_has_the_layout_of_compressed_tensors_and_is_read_again(to, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD", 150_000)
    made = quantize_checkpoint(plain, to, tmp_path / "out", device="cpu")
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files[0].startswith("model-00001-of-0000") and len(files) > 1
    tensors = {k: v for file in files for k, v in load_file(tmp_path / "out" / file).items()}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    how = settings["config_groups"]["group_0"]
    assert settings["quant_method"] == "compressed-tensors" and how["targets"] == ["Linear"]
    assert settings["ignore"] == ["lm_head"] == list(made.plain) and made.tensors == 14
    original = load_file(plain / "model.safetensors")[f"{Q}.weight"]
    format = weight_format(to)
    if to == "fp8":
        assert settings["format"] == "float-quantized" and how["weights"]["strategy"] == "channel"
        assert tensors[f"{Q}.weight"].dtype == torch.float8_e4m3fn and tensors[f"{Q}.weight_scale"].shape == (96, 1)
    else:
        bits = 4 if to == "int4" else 8
        assert settings["format"] == "pack-quantized" and how["weights"]["group_size"] == 32
        assert how["weights"]["num_bits"] == bits and how["weights"]["symmetric"] == (to == "int8")
        words, scales = tensors[f"{Q}.weight_packed"], tensors[f"{Q}.weight_scale"]
        assert words.dtype == torch.int32 and words.shape == (96, 96 * bits // 32) and scales.dtype == torch.bfloat16
        assert tensors[f"{Q}.weight_shape"].tolist() == [96, 96]
        zero = torch.full((96, 3), 1 << bits - 1)
        if to == "int4":
            packed = tensors[f"{Q}.weight_zero_point"]
            assert packed.shape == (12, 3) and packed.dtype == torch.int32
            zero = torch.stack([packed[i // 8] >> 4 * (i % 8) & 15 for i in range(96)])
        each = 32 // bits  # as the format is described, value by value
        codes = torch.stack([words[:, j // each] >> bits * (j % each) & (1 << bits) - 1 for j in range(96)], 1)
        values = (codes - zero.repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
        assert (values - original.float()).norm() < 0.09 * original.float().norm()
    ours, wanted = lamina.load(tmp_path / "out", device="cpu"), lamina.load(plain, device="cpu")
    stored = ours.blocks[1].attention.out.weight
    assert stored.format.name == to and not isinstance(ours.head.weight, type(stored))
    dense = wanted.blocks[1].attention.out.weight.float()
    parts = format.pack(dense) if to == "fp8" else format.pack(dense, torch.bfloat16)
    again = format.dequantize(parts, dense.shape, torch.float32)
    assert torch.allclose(stored.dense(torch.float32), again, rtol=0.01)
    assert ours.dtype == torch.bfloat16 and relative(ours(IDS).float(), wanted(IDS).float()) < 0.3
    assert made.quality is not None and 0 <= made.quality.kl < 0.1 and made.after < made.before


def test_a_model_does_not_differ_from_itself(plain):
    found = compare(plain, plain, "The river begins in the hills", "cpu")
    assert found == Quality(found.tokens, 0.0, 1.0) and "mean KL 0.0000 nats, the same best token at 100.0%" in str(
        found
    )


def test_the_command_says_what_it_wrote_and_refuses_what_it_cannot(plain, tmp_path):
    def run(*args):
        return CliRunner().invoke(commands(), ["quantize", str(plain), *args, "--device", "cpu"])

    done = run("--to", "int8", "--out", str(tmp_path / "q"))
    assert (
        done.exit_code == 0 and "14 matrices in int8" in done.stdout and "against the original: mean KL" in done.stdout
    )
    assert "is not empty: give a new folder" in run("--to", "int8", "--out", str(tmp_path / "q")).stderr
    with pytest.raises(InputError, match="--to int3: it must be one of"):
        quantize_checkpoint(plain, "int3", tmp_path / "x")
    with pytest.raises(InputError, match="group=48: values that share a scale are a multiple of 32"):
        quantize_checkpoint(plain, "int4", tmp_path / "x", group=48)
