"""Configurations: a value that no model can have is refused by name before anything is built."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, T5Config

import lamina
from lamina.checkpoint.shapes import SHAPES
from lamina.config import Config
from lamina.config_fields import FIELDS
from lamina.models import family, known_types
from tests.families.cases import FIRST, cases
from tests.families.cases.llama import make

LLAMA = make().to_dict()
LAYERS, HEADS, WIDTH = "1 to 10,000", "1 to 100,000", "1 to 1,000,000"


def build(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return family(Config(config).model_type).build(Config(config))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_attention_heads", 0, f"num_attention_heads=0 in the configuration must be a whole number from {HEADS}"),
        ("num_attention_heads", -4, f"num_attention_heads=-4 in the configuration must be a whole number from {HEADS}"),
        ("hidden_size", "64", f"hidden_size='64' in the configuration must be a whole number from {WIDTH}"),
        ("hidden_size", 64.5, f"hidden_size=64.5 in the configuration must be a whole number from {WIDTH}"),
        ("hidden_size", True, f"hidden_size=True in the configuration must be a whole number from {WIDTH}"),
        ("hidden_size", None, f"hidden_size=null in the configuration must be a whole number from {WIDTH}"),
        ("num_hidden_layers", 10**7, f"num_hidden_layers=10000000 in the configuration must be .* {LAYERS}"),
        ("num_hidden_layers", [2], r"num_hidden_layers=\[2\] in the configuration"),
        ("vocab_size", 0, "vocab_size=0 in the configuration must be a whole number from 1 to 100,000,000"),
        ("intermediate_size", -1, "intermediate_size=-1 in the configuration must be a whole number from 0"),
        ("head_dim", 0, "head_dim=0 in the configuration"),
        ("head_dim", 7, "rotary positions rotate pairs of dimensions, and 7 of a head cannot be paired"),
        ("num_key_value_heads", 3, "num_key_value_heads=3 in the configuration does not divide num_attention_heads=4"),
        ("rms_norm_eps", "small", "rms_norm_eps='small' in the configuration must be a number of at least 0"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps=nan in the configuration must be a number"),
        ("max_position_embeddings", -1, "max_position_embeddings=-1 in the configuration"),
        ("attention_bias", "no", "attention_bias='no' in the configuration must be true or false"),
        ("hidden_act", ["silu"], r"hidden_act=\['silu'\] in the configuration must be a text"),
        ("rope_parameters", "default", "rope_parameters='default' in the configuration must be an object"),
        ("rope_parameters", {"rope_theta": 0}, "rope_theta=0 in the configuration must be a number above 0"),
        ("rope_parameters", {"rope_type": "linear"}, "rotary positions has no 'factor'"),
        ("rope_parameters", {"rope_type": "llama3", "factor": "8"}, "factor='8' in the configuration must be a number"),
        ("rope_parameters", {"rope_type": ["yarn"]}, r"rope_type=\['yarn'\] in the configuration must be a text"),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_name(name: str, value: Any, text: str) -> None:
    with pytest.raises(lamina.InputError, match=text):
        build(LLAMA | {name: value})


@pytest.mark.parametrize(
    ("case", "name", "value", "text"),
    [
        ("mamba2", "n_groups", 3, "8 heads cannot share 3 groups"),
        ("mamba2", "conv_kernel", 0, "conv_kernel=0 in the configuration"),
        (
            "mamba2",
            "time_step_limit",
            [0.1],
            r"time_step_limit=\[0.1\] in the configuration must be a list of 2 numbers",
        ),
        ("falcon_h1", "mamba_n_groups", 4, "mamba_n_groups=4 in the configuration does not divide mamba_n_heads=6"),
        ("qwen3_next", "linear_num_key_heads", 3, "does not divide linear_num_value_heads"),
        (
            "qwen3_next",
            "num_experts_per_tok",
            99,
            "num_experts_per_tok=99 in the configuration is more than num_experts",
        ),
        ("qwen3_next", "layer_types", 5, "layer_types=5 in the configuration must be a list of texts"),
        ("deepseek_v3", "topk_group", 9, "topk_group=9 in the configuration is more than n_group"),
        ("deepseek_v3", "n_group", 0, "n_group=0 in the configuration"),
        ("deepseek_v3", "kv_lora_rank", None, "kv_lora_rank=null in the configuration"),
        ("llama4", "attention_chunk_size", 0, "attention_chunk_size=0 in the configuration"),
        ("gemma2", "sliding_window", None, "sliding_window=null in the configuration"),
        ("gemma2", "attn_logit_softcapping", "50", "attn_logit_softcapping='50' in the configuration must be a number"),
        ("lfm2", "block_multiple_of", 0, "block_multiple_of=0 in the configuration"),
        ("t5", "num_layers", 10**9, "num_layers=1000000000 in the configuration"),
        ("t5", "d_kv", 0, "d_kv=0 in the configuration"),
    ],
)
def test_families_refuse_by_name_what_they_cannot_be(case: str, name: str, value: Any, text: str) -> None:
    made = T5Config() if case == "t5" else next(cases(kind)[which]() for kind, which in FIRST if kind == case)
    config = made.to_dict()
    assert build(config) is not None
    with pytest.raises(lamina.InputError, match=text):
        build(config | {name: value})


@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name].config["model_type"] in known_types()])
def test_real_models_are_not_refused(name: str) -> None:
    assert build(dict(SHAPES[name].config)) is not None


def test_what_a_family_does_not_read_may_be_anything() -> None:
    read = build(LLAMA).config.seen
    odd = {name: "anything" for name in FIELDS if name not in {*read, *LLAMA}} | {"num_key_values": -1, "d_model": None}
    del odd["quantization_config"]
    assert len(odd) > 100 and build({**LLAMA, **odd}).config.get("num_key_values") == -1


def test_a_whole_number_may_be_written_as_a_float() -> None:
    assert len(build(LLAMA | {"num_hidden_layers": 2.0}).blocks) == 2


def test_heads_that_do_not_divide_the_width_are_refused_unless_their_width_is_given() -> None:
    config = LLAMA | {"num_attention_heads": 5, "num_key_value_heads": 5}
    assert build(config | {"head_dim": 8}).specs
    with pytest.raises(
        lamina.InputError, match=r"num_attention_heads=5 .* does not divide hidden_size=32, and there is no"
    ):
        build(config | {"head_dim": None})


def test_loading_and_planning_refuse_before_anything_is_allocated(tmp_path: Path) -> None:
    LlamaForCausalLM(make()).save_pretrained(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    for change in ({"num_hidden_layers": 10**7}, {"num_attention_heads": 0}, {"hidden_size": "64"}, {"vocab_size": -1}):
        (tmp_path / "config.json").write_text(json.dumps(good | change))
        begun = time.process_time()
        for call in (lamina.load, lamina.plan):
            with pytest.raises(lamina.InputError, match=f"{next(iter(change))}=.* in the configuration must be"):
                call(tmp_path)  # type: ignore[operator]
        assert time.process_time() - begun < 5
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(good | {"eos_token_id": "</s>"}))
    with pytest.raises(lamina.LaminaError, match=r"eos_token_id='</s>' of .* must be an id, or a list of ids"):
        lamina.load(tmp_path, device="cpu")


# -- what was read -----------------------------------------------------------------------------------------------------


def test_fields_that_no_code_read_are_named_also_inside_objects() -> None:
    config = Config(
        {
            "hidden_size": 64, "dilation": 2, "attention_dropout": 0.1, "eos_token_id": 1, "output_attentions": False,
            "rope_parameters": {"rope_theta": 1e4, "turns": 3},
            "text_config": {"num_layers": 2, "odd": 1, "dtype": 5},
        }
    )  # fmt: skip
    assert config.unread == ["hidden_size", "dilation", "rope_parameters", "text_config"]
    assert config.rope_parameters["rope_theta"] == 1e4 and config.with_values(num_heads=4).hidden_size == 64
    assert config.part("text_config").num_layers == 2
    assert config.unread == ["dilation", "rope_parameters.turns", "text_config.odd"]
    assert dict(config.rope_parameters) == {"rope_theta": 1e4, "turns": 3}  # a copy reads all of it
    config.ignore("dilation")
    assert config.unread == ["text_config.odd"]


def test_a_field_is_found_under_its_old_name_and_both_names_count_as_read() -> None:
    config = Config({"model_type": "gpt2", "n_embd": 64, "hidden_size": None, "n_layer": 4})
    assert config.first("hidden_size", "n_embd") == 64 and config.first("n_inner", default=7) == 7
    assert config.unread == ["model_type", "n_layer"]
    aliased = config.with_aliases({"num_hidden_layers": "n_layer", "num_heads": "n_head"}).with_values(n_layer=3)
    assert aliased.unread == config.unread and aliased.get("num_hidden_layers") is not None
    assert aliased.unread == config.unread == ["model_type"]
    with pytest.raises(lamina.InputError, match=r"configuration of gpt2 has no 'num_heads' or 'n_head', which Lamina"):
        config.first("num_heads", "n_head")
    config.values["n_layer"] = 0
    with pytest.raises(lamina.InputError, match="n_layer=0 in the configuration must be a whole number from 1"):
        config.first("num_hidden_layers", "n_layer")


def test_fields_that_change_attention_are_not_among_those_without_effect() -> None:
    odd = {name: 1 for name in ("attention_chunk_size", "sliding_window", "attn_temperature_tuning", "chunk_size")}
    assert Config(odd).unread == ["attention_chunk_size", "sliding_window", "attn_temperature_tuning"]
