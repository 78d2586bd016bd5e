"""A GGUF file of every architecture gives the logits of the folder that it was made from."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lamina
from lamina.checkpoint import open_source
from lamina.checkpoint.gguf.changes import UNPAIRED
from lamina.checkpoint.gguf.dense import LLAMA as LLAMA_NAMES
from lamina.checkpoint.gguf.file import ARCHITECTURES, Architecture
from lamina.checkpoint.gguf.split import read_parts
from lamina.models.llama import Llama
from tests.checkpoint.gguf_converter import write_gguf
from tests.checkpoint.gguf_formats import FORMATS
from tests.checkpoint.gguf_older import OLDER
from tests.checkpoint.test_gguf import llama_arrays, write
from tests.families.cases import cases
from tests.families.harness import random_ids, relative

TOLERANCE = 1e-5
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Case:
    """A case of a family, changed to what a GGUF file can say: files assume what all releases of a family have."""

    family: str
    name: str | None = None  # the first if None
    changes: dict[str, Any] = field(default_factory=dict)
    older: str = ""  # the format of files of earlier times

    def __str__(self) -> str:
        return "-".join(part for part in (self.family, self.name, self.older) if part)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA3 = {"layer_types": [SLIDING] * 5 + [FULL], "num_hidden_layers": 6}
LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.9,
    "mscale_all_dim": 0.9, "beta_fast": 16, "beta_slow": 2,
}  # fmt: skip
CASES = [
    Case("llama"),
    Case("llama", "tied, biases, own head dim"),
    Case("llama", "llama3 rope", {"rope_parameters": LLAMA3}),
    Case("mistral", "full, own head dim"),
    Case("mixtral"),
    Case("qwen2"),
    Case("qwen2_moe"),
    Case("qwen3"),
    Case("qwen3_moe"),
    Case("gemma"),
    Case("gemma2"),
    Case("gemma3_text", changes=GEMMA3 | {"query_pre_attn_scalar": 16}),
    Case(
        "gemma3_text", "scaled full layers, biases, untied, capped logits",
        GEMMA3 | {"query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    ),
    Case("gemma3n_text"),
    Case("gemma4_text"),
    Case("gemma4_text", "values are keys, fewer key heads, experts"),
    Case("phi"),
    Case("phi3"),
    Case("phi3", "longrope, partly rotated, tied"),
    Case("granite"),
    Case("granitemoe"),
    Case("granitemoeshared"),
    Case("cohere"),
    Case("cohere", "normed queries, biases"),
    Case("cohere2", changes={"layer_types": [SLIDING] * 3 + [FULL], "num_hidden_layers": 4}),
    Case("olmo"),
    Case("olmo", "clipped, biases, tied"),
    Case("olmo2"),
    Case("olmo3"),
    Case("glm4"),
    Case("gpt2"),
    Case("gpt_oss"),
    Case("smollm3"),
    Case("stablelm"),
    Case("stablelm", "side by side, norms of heads, biases", {"rope_parameters.rope_theta": 10000.0}),
    Case("starcoder2"),
    Case("falcon"),
    Case("falcon", "new architecture, two norms", {"rope_parameters.rope_theta": 10000.0, "bias": False}),
    Case("bloom"),
    Case("deepseek_v2"),
    Case("deepseek_v2", "limited groups, whole queries"),
    Case("deepseek_v3"),
    Case("deepseek_v3", "yarn, one group, wide latent", {"rope_parameters": YARN}),
    Case("glm4_moe"),
    Case("llama4", changes=LLAMA4),
    Case("llama4", changes=LLAMA4 | {"rope_parameters": LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}}),
    Case("mamba"),
    Case("falcon_mamba"),
    Case("mamba2"),
    Case("jamba"),
    Case("falcon_h1"),
    Case("granitemoehybrid"),
    Case("granitemoehybrid", "dense, rope, tied, factors", {"position_embedding_type": None}),
    Case("nemotron_h"),
    Case("nemotron_h", "tied, biases, latent experts"),
    Case("lfm2"),
    Case("lfm2_moe"),
    Case("qwen3_next"),
    Case("qwen3_5_text"),
    Case("qwen3_5_moe_text"),
    Case("kimi_linear"),
    Case("bamba"),
    Case("ministral3"),
    Case("mistral", "full, own head dim", older="mistral3"),
    Case(
        "nemotron_h", "pattern, long kernel, wide state", older="nemotron_h",
        changes={"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "time_step_min": 0.001},
    ),
    Case("mixtral", older="a tensor per expert"),
    Case("deepseek_v2", older="latents in one tensor"),
    Case("phi", changes={"num_key_value_heads": 4}, older="queries, keys and values in one tensor"),
    Case("qwen3_next", older="rows by key head"),
]  # fmt: skip


def save(case: Case, folder: Path) -> None:
    """A random model of transformers, saved as it saves models."""
    found = cases(case.family)
    config = found[case.name or next(iter(found))]()
    for name, value in case.changes.items():
        part, _, inner = name.partition(".")
        if inner:
            getattr(config, part)[inner] = value
        else:
            setattr(config, part, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms are one and biases zero by default, which would hide mistakes
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.05)
    model.save_pretrained(folder)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_file_gives_the_logits_of_its_original(tmp_path: Path, case: Case) -> None:
    save(case, tmp_path)
    form = OLDER[case.older] if case.older else FORMATS[case.family]
    path = write_gguf(tmp_path, form, tmp_path / "model.gguf")
    original, ours = (lamina.load(source, device="cpu", dtype="float32") for source in (tmp_path, path))
    ids = random_ids(1, 24, original.vocab)
    assert relative(ours(ids), original(ids)) < TOLERANCE
    unread = lamina.inspect(path).unread
    assert set(unread) <= json.loads((tmp_path / "config.json").read_text()).keys(), "fields that the original lacks"


def test_every_architecture_is_tested() -> None:
    assert {form.architecture for form in (*FORMATS.values(), *OLDER.values())} == set(ARCHITECTURES)
    assert {case.family for case in CASES} == set(FORMATS)
    assert {case.older for case in CASES} == {*OLDER, ""}


def test_experts_in_mxfp4_are_dequantized(tmp_path: Path) -> None:
    """Values that MXFP4 has are read as they are. Blocks are of 32 values, the width of the model."""
    import gguf

    case = Case("gpt_oss", changes={"intermediate_size": 32})
    save(case, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kind = gguf.GGMLQuantizationType.MXFP4
    for name, tensor in tensors.items():
        if "experts" in name and "bias" not in name:  # rows of 32 are inputs, which are the second axis
            rows = gguf.dequantize(gguf.quantize(tensor.mT.contiguous().numpy(), kind), kind)
            tensors[name] = torch.from_numpy(rows).mT.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    path = write_gguf(
        tmp_path, FORMATS["gpt_oss"], tmp_path / "model.gguf", lambda name: kind if "exps.w" in name else None
    )
    original, ours = (
        lamina.load(source, device="cpu", dtype="float32", activations="float32") for source in (tmp_path, path)
    )
    ids = random_ids(1, 24, original.vocab)
    assert relative(ours(ids), original(ids)) < TOLERANCE


def fused(tensors: Any, c: Any) -> Any:
    """Gates and ups of stacked experts become one stack."""
    gates = {name: t for name, t in tensors.items() if re.search(r"\.experts\.(gate_proj|w1)\.weight", name)}
    ups = {name: re.sub("gate_proj", "up_proj", name).replace("w1", "w3") for name in gates}
    rest = {name: t for name, t in tensors.items() if name not in gates and name not in ups.values()}
    both = {re.sub("gate_proj|w1", "both", name): torch.cat([t, tensors[ups[name]]], 1) for name, t in gates.items()}
    return rest | both


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "lfm2_moe"])
@pytest.mark.parametrize("quantized", [False, True])
def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path: Path, family: str, quantized: bool) -> None:
    import gguf

    def kind_of(name: str) -> Any:
        return gguf.GGMLQuantizationType.Q8_0 if quantized and re.search("(gate|up)_exps", name) else None

    save(Case(family), tmp_path)
    form = FORMATS[family]
    names = {r"model\.layers\.(\d+)\..*experts\.both\.weight": r"blk.\1.ffn_gate_up_exps.weight", **(form.names or {})}
    one = replace(form, steps=(*form.steps, fused), names=names)
    paths = [write_gguf(tmp_path, made, tmp_path / f"{i}.gguf", kind_of) for i, made in enumerate((form, one))]
    apart, together = (lamina.load(path, device="cpu", dtype="float32") for path in paths)
    ids = random_ids(1, 8, apart.vocab)
    assert torch.equal(apart(ids), together(ids))
    assert any("gate_up_exps" in name for name in read_parts(paths[1])[1])


def test_an_architecture_from_outside_the_package_is_read(tmp_path: Path) -> None:
    class OutsideLlama(Llama):
        pass

    mine = Architecture(LLAMA_NAMES, model_types=("outside_llama",), changes=UNPAIRED)
    lamina.register_family("outside_llama", OutsideLlama, gguf={"outside": mine})
    try:
        arrays = llama_arrays()
        paths = [write(tmp_path / f"{name}.gguf", arrays, architecture=name) for name in ("llama", "outside")]
        known, ours = (lamina.load(path, device="cpu") for path in paths)
        assert type(ours) is OutsideLlama
        ids = random_ids(1, 8, known.vocab)
        assert torch.equal(ours(ids), known(ids))
        with pytest.raises(lamina.InputError, match=r"GGUF architecture 'outside' is registered already"):
            lamina.register_family("another", OutsideLlama, gguf={"outside": Architecture({})})
    finally:
        lamina.unregister_family("outside_llama")
        del ARCHITECTURES["outside"]


def test_a_model_for_images_is_refused_if_its_rows_have_another_order(tmp_path: Path) -> None:
    def sections(writer: Any) -> None:
        writer.add_rope_dimension_sections([8, 12, 12, 0])

    path = write(tmp_path / "m.gguf", llama_arrays(), architecture="glm4", extra=sections)
    with pytest.raises(lamina.CheckpointError, match=r"glm4 GGUF is of a model for images"):
        open_source(path)


def test_layers_with_different_numbers_of_key_heads_are_refused(tmp_path: Path) -> None:
    def heads(writer: Any) -> None:
        writer.kv_data[0].pop("qwen3.attention.head_count_kv")
        writer.add_head_count_kv([2, 1])

    path = write(tmp_path / "m.gguf", llama_arrays(), architecture="qwen3", extra=heads)
    with pytest.raises(lamina.CheckpointError, match=r"qwen3\.attention\.head_count_kv is \[2, 1\]"):
        open_source(path)
