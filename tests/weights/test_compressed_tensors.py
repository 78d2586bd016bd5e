"""compressed-tensors, with which transformers reads quantized folders, reads what `lamina quantize` writes, and we read
what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization import apply_quantization_config as apply_config
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lamina
from lamina.native import library
from lamina.quantizing import quantize_checkpoint
from lamina.weights import packed_formats
from tests.families.harness import relative

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
GROUP = 32


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """k and v have 12 rows, which fill no whole number of words of zeros."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=8, head_dim=12,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def both(folder: Path) -> tuple[Tensor, Tensor, lamina.Model]:
    """Logits of transformers and ours, in float32, and our model."""
    library.library()
    ours = lamina.load(folder, dtype="float32", device="cpu", activations="float32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return theirs(IDS).logits, ours(IDS), ours


def formats(model: lamina.Model) -> set[str]:
    return {name.partition(",")[0] for name in packed_formats(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", ["int4", "int8", "fp8"])
def test_transformers_reads_what_we_write(to, dtype, tmp_path):
    llama(dtype).save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", to, tmp_path / "q", device="cpu")
    theirs, ours, model = both(tmp_path / "q")
    assert formats(model) == {to} and relative(theirs, ours) < 1e-4
    with torch.no_grad():
        assert 1e-3 < relative(ours, lamina.load(tmp_path / "plain", dtype="float32", device="cpu")(IDS)) < 0.3


def args(**how: Any) -> QuantizationArgs:
    return QuantizationArgs(**({"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP} | how))


SCHEMES = {
    "int4": args(symmetric=True),
    "int4, zeros": args(symmetric=False),
    "int8": args(num_bits=8, symmetric=True),
    "int8, zeros": args(num_bits=8, symmetric=False),
    "int8, a scale for a row": args(num_bits=8, strategy="channel", group_size=None),
    "fp8": args(num_bits=8, type="float", strategy="channel", group_size=None),
}


def calibrate(module: nn.Module, how: QuantizationArgs) -> None:
    """Sets the scales and zeros of a layer by the range of its weight."""
    weight = module.weight.detach()
    groups = weight.unflatten(1, (-1, GROUP)) if how.strategy == "group" else weight[:, None]
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), how)
    module.weight_scale.data.copy_(scales)
    if not how.symmetric:
        module.weight_zero_point.data.copy_(zeros)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_we_read_what_compressed_tensors_writes(scheme, tmp_path):
    model, how = llama(), SCHEMES[scheme]
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=how)}
    apply_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    layers = [one for one in model.modules() if hasattr(one, "weight_scale")]
    for one in layers:
        calibrate(one, how)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    theirs, ours, packed = both(tmp_path)
    assert formats(packed) == {scheme.partition(",")[0]} and len(layers) == 14
    assert relative(theirs, ours) < 1e-4
    with torch.no_grad():
        assert 1e-3 < relative(ours, llama()(IDS).logits) < 0.3
