"""Releases as they are on the Hub: config.json is read to the last field, tensor names and shapes fit, and the number
of parameters is the published one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import lamina
from lamina.checkpoint.base_model import with_prefix
from lamina.checkpoint.loader import plan
from lamina.checkpoint.quantized import with_weights
from lamina.config import Config
from lamina.errors import InputError
from lamina.loading import refuse_quantized
from lamina.models import OTHER_TYPES, family_of
from lamina.nn import Rotary
from tests.families import encoder_decoder_cases
from tests.families.cases import cases
from tests.families.harness import pair, random_ids
from tests.families.releases import dense, encoder_decoder, gpt, mixtures, others, recurrent
from tests.families.releases.header import Header
from tests.families.test_published_configs import built
from tests.families.test_published_files import described

TABLES = (dense, gpt, mixtures, recurrent, encoder_decoder, others)
RELEASES = {name: release for table in TABLES for name, release in table.RELEASES.items()}


@pytest.mark.parametrize("name", RELEASES)
def test_a_published_release_fits(name: str) -> None:
    parameters, tensors, values = RELEASES[name]
    config = Config(values)
    family = family_of(config)
    refuse_quantized(config, name, getattr(family, "quantized", ()))
    with torch.device("meta"):
        model = family.build(config)
    source = with_prefix(family.part_of(with_weights(Header(name, values, tensors))), model.names)
    plan(model, source, model.names, torch.bfloat16, tuple(model.ignored))
    count = sum(one.numel() for one in set(model.parameters()))
    assert count == parameters if isinstance(parameters, int) else count == pytest.approx(parameters, rel=0.01)
    assert model.context is None or model.context > 0
    assert set(config.unread) <= {"model_type"}


READ_OTHERWISE = {
    # transformers reads T5 files as tied, whatever they say, and this one by its outer configuration
    "google/flan-t5-small": {"head.weight"},
    "google/mt5-small": {"head.weight"},
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": {"head.weight"},
    "google/umt5-small": {"head.weight", ".scale"},
}
"""Release -> what is known to differ."""


def meta(values: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = family_of(config := Config(values)).build(config)
    for module in model.modules():
        if isinstance(module, Rotary):
            module.to_empty(device="cpu").reset_buffers()
    return model


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if torch.is_tensor(one) and torch.is_tensor(other) else bool(one == other)


@pytest.mark.parametrize("name", [name for name in RELEASES if RELEASES[name].config["model_type"] not in OTHER_TYPES])
def test_a_published_configuration_means_what_transformers_reads_in_it(name: str) -> None:
    values = {key: value for key, value in RELEASES[name].config.items() if key != "quantization_config"}
    ours, theirs = meta(values), meta(AutoConfig.for_model(**values).to_dict())
    assert ours.specs == theirs.specs and ours.context == theirs.context
    found, expected = described(ours), described(theirs)
    changed = {path for path in found.keys() | expected.keys() if not same(found.get(path), expected.get(path))}
    assert changed <= READ_OTHERWISE.get(name, set())


MINIMAX = dict(
    vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_local_experts=2, num_experts_per_tok=2,
    rope_theta=1e7, rotary_dim=4,
)  # fmt: skip


def test_the_first_release_of_minimax_has_names_of_its_own() -> None:
    first = built(MINIMAX | dict(
        model_type="minimax_text_01", attn_type_list=[0, 1], postnorm=True, shared_intermediate_size=[0],
        shared_moe_mode="sigmoid", layernorm_full_attention_alpha=3.5, layernorm_full_attention_beta=0.5,
        layernorm_linear_attention_alpha=3.25, layernorm_linear_attention_beta=0.75, layernorm_mlp_alpha=2.5,
        layernorm_mlp_beta=0.25,
    ))  # fmt: skip
    later = built(MINIMAX | dict(
        model_type="minimax", layer_types=["linear_attention", "full_attention"], full_attn_alpha_factor=3.5,
        full_attn_beta_factor=0.5, linear_attn_alpha_factor=3.25, linear_attn_beta_factor=0.75, mlp_alpha_factor=2.5,
        mlp_beta_factor=0.25,
    ))  # fmt: skip
    assert first.specs == later.specs
    assert [block.alphas for block in first.blocks] == [(3.25, 2.5), (3.5, 2.5)]
    assert described(first) == described(later)
    assert first.ropes["default"].dim == 4  # half of a head, which transformers 5 does not know


def test_a_text_model_under_the_names_of_a_multimodal_release_loads(tmp_path: Path) -> None:
    theirs, ours = pair("qwen3", next(iter(cases("qwen3"))))
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"model.visual.proj.weight": torch.ones(2)}, file)
    ids = random_ids(1, 5, ours.vocab)
    assert torch.equal(lamina.load(tmp_path, device="cpu")(ids), ours(ids))


def test_pegasus_without_its_positions_computes_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = encoder_decoder_cases.FAMILIES["pegasus"]["plain"]()
    theirs = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "embed_positions" not in name}, file)
    ours = lamina.load(tmp_path, device="cpu")
    for stack, own in ((theirs.model.encoder, ours.encoder), (theirs.model.decoder, ours)):
        torch.testing.assert_close(own.positions.weight, stack.embed_positions.weight)


@pytest.mark.parametrize(
    ("release", "changes", "said"),
    [
        ("CohereForAI/c4ai-command-r7b-12-2024", dict(use_parallel_block=False), "use_parallel_block=False"),
        ("tencent/Hunyuan-A13B-Instruct", dict(num_shared_expert=[2] * 32), "num_shared_expert="),
        ("tencent/Hunyuan-A13B-Instruct", dict(use_mla=True), "use_mla=True"),
        ("MiniMaxAI/MiniMax-M2 in bfloat16", dict(attn_type_list=[0, 1]), "attn_type_list="),
        ("ai21labs/Jamba-v0.1", dict(mamba_inner_layernorms=False), "mamba_inner_layernorms=False"),
        ("LiquidAI/LFM2-1.2B", dict(block_use_swiglu=False), "block_use_swiglu=False"),
        ("Qwen/Qwen2.5-7B", dict(use_mrope=True), "use_mrope=True"),
    ],
)
def test_fields_of_published_files_that_ask_for_something_else_are_refused(
    release: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        built(RELEASES[release].config | changes)


def test_published_fields_under_two_names() -> None:
    config = RELEASES["google/recurrentgemma-2b"].config
    kinds = [set(spec) for spec in built(config | dict(_block_types=["attention", "recurrent"])).specs]
    assert kinds == [{"attention"}, kinds[1]] * 13 and kinds[1] != {"attention"}
    with pytest.raises(InputError, match="hidden_activation='silu'"):  # transformers 5 does not read it
        built(RELEASES["google/gemma-2b"].config | dict(hidden_activation="silu"))
    assert built(RELEASES["CohereForAI/c4ai-command-r-v01"].config).context == 131072
    apertus = RELEASES["swiss-ai/Apertus-8B-2509"].config | dict(rope_scaling=None, rope_theta=5e5)
    assert built(apertus).ropes["default"].settings["rope_type"] == "default"


@pytest.mark.parametrize("release", ["state-spaces/mamba-130m-hf", "mistralai/Mamba-Codestral-7B-v0.1"])
def test_the_embedding_of_mamba_has_two_names(release: str) -> None:
    _, tensors, values = RELEASES[release]
    model = built(values)
    other = {name.replace(".embeddings.", ".embedding."): shape for name, shape in tensors.items()}
    plan(model, Header(release, values, other), model.names, torch.bfloat16, tuple(model.ignored))
