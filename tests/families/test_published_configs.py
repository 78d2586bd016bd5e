"""Configurations as releases have them, with old names and without fields that have a default, mean the same to us as
to transformers: the same specs, rotary frequencies and factors as its configuration, written out in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import lamina
from lamina.config import Config
from lamina.errors import InputError
from lamina.model import Model
from lamina.models import family
from lamina.nn import Norm, Rotary
from tests.families.cases import cases, dense_a
from tests.families.harness import TOLERANCE, random_ids, relative

SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=67, max_position_embeddings=256,
)  # fmt: skip
MINIMAL: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=7, intermediate_size=48)
LLAMA3: dict[str, Any] = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LONG: dict[str, Any] = dict(short_factor=[1.0, 1.5, 2.0, 3.0], long_factor=[4.0, 5.0, 6.0, 7.0])
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3_text, of a multimodal release": MINIMAL | dict(
        rope_scaling=dict(factor=8.0, rope_type="linear"), sliding_window=16
    ),
    "gemma3_text, old names": SIZES | dict(
        head_dim=8, rope_theta=1e5, rope_local_base_freq=300.0, sliding_window_pattern=2, sliding_window=16
    ),
    "gemma3n_text, few fields": MINIMAL | dict(
        num_hidden_layers=12, num_kv_shared_layers=5, rope_theta=1e5, rope_local_base_freq=300.0, vocab_size=67,
        vocab_size_per_layer_input=67,
    ),
    "gemma4_text, heads of full layers": SIZES | dict(
        head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, num_hidden_layers=7,
        vocab_size_per_layer_input=67,
    ),
    "gemma4_text, few fields": MINIMAL | dict(vocab_size=67, vocab_size_per_layer_input=67),
    "cohere2, a pattern": SIZES | dict(sliding_window_pattern=2, rope_theta=5e4, sliding_window=16),
    "olmo3, scaled": SIZES | dict(
        sliding_window=16, rope_theta=5e5, max_position_embeddings=512,
        rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, attention_factor=1.2),
    ),
    "deepseek_v32, old names": SIZES | dict(
        num_key_value_heads=4, rope_theta=1e4, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
        ep_size=1, n_routed_experts=16, num_nextn_predict_layers=1, rope_scaling=dict(
            type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0,
            beta_fast=32, beta_slow=1,
        ),
    ),
    "glm_moe_dsa, a period": SIZES | dict(
        num_key_value_heads=4, n_routed_experts=16, index_topk_freq=2, indexer_rope_interleave=True,
    ),
    "exaone4, every fourth layer": SIZES | dict(sliding_window=16, rope_theta=1e6),
    "cwm, settings of its own": SIZES | dict(sliding_window=16),
    "apertus, settings of its own": SIZES,
    "ministral3, settings of its own": SIZES,
    "ministral, settings of its own": SIZES | dict(head_dim=8),
    "phi, old name of the rotated part": SIZES | dict(partial_rotary_factor=0.25, rope_theta=1e3),
    "phi3, an old name of longrope": SIZES | dict(
        original_max_position_embeddings=64, max_position_embeddings=512, rope_scaling=dict(type="yarn", **LONG)
    ),
    "llama, rope_scaling beside rope_parameters": SIZES | dict(
        rope_scaling=dict(type="linear", factor=4.0), rope_parameters=dict(rope_type="default", rope_theta=1e3)
    ),
    "llama, no original length": SIZES | dict(rope_scaling=dict(rope_type="llama3", **LLAMA3)),
    "qwen3, no head_dim": SIZES,
    "qwen2_moe, few fields": SIZES | dict(num_experts=4),
    "deepseek_v3, few fields": SIZES | dict(num_key_value_heads=4, n_routed_experts=16),
    "deepseek_v3, another name of the experts": SIZES | dict(num_key_value_heads=4, num_local_experts=16),
    "glm4_moe, few fields": SIZES | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=20),
}  # fmt: skip


def built(values: dict[str, Any]) -> Model:
    with torch.device("meta"):
        model = family(values["model_type"]).build(Config(values))
    for module in model.modules():
        if isinstance(module, Rotary):
            module.to_empty(device="cpu").reset_buffers()
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_means_the_same_as_in_transformers(name: str) -> None:
    values = {"model_type": name.partition(",")[0], **PUBLISHED[name]}
    ours, full = built(values), built(AutoConfig.for_model(**values).to_dict())
    assert ours.specs == full.specs
    assert ours.context == full.context
    ropes = [{path: one for path, one in model.named_modules() if isinstance(one, Rotary)} for model in (ours, full)]
    for path, one in ropes[1].items():
        torch.testing.assert_close(ropes[0][path].frequencies, one.frequencies, rtol=1e-6, atol=0)
        assert ropes[0][path].scale == pytest.approx(one.scale)
    shapes = [{path: one.shape for path, one in model.named_parameters()} for model in (ours, full)]
    assert shapes[0] == shapes[1]
    norms = [{path: one.eps for path, one in m.named_modules() if isinstance(one, Norm)} for m in (ours, full)]
    assert norms[0] == norms[1]


def test_the_oldest_name_of_longrope() -> None:
    """transformers fails on it."""
    values = {"model_type": "phi3", **SIZES, "original_max_position_embeddings": 64, "max_position_embeddings": 512}
    old, new = (
        built(values | {"rope_scaling": dict(type=name, **LONG)}).ropes["default"] for name in ("su", "longrope")
    )
    assert isinstance(old, Rotary) and isinstance(new, Rotary)
    assert torch.equal(old.frequencies, new.frequencies) and old.scale == new.scale > 1


def test_patterns_of_layers_as_text_and_no_window() -> None:
    """transformers fails on both."""
    values = {"model_type": "exaone4", **SIZES, "num_hidden_layers": 5, "sliding_window": 16}
    kinds = [spec["attention"].window.span for spec in built(values | {"sliding_window_pattern": "LLG"}).specs]
    assert kinds == [16, 16, None, 16, None]
    specs = built(values | {"sliding_window": None}).specs
    assert [spec["attention"].window.span for spec in specs] == [None] * 5
    specs = built({"model_type": "ministral", **SIZES, "sliding_window": None}).specs
    assert [spec["attention"].window.span for spec in specs] == [None] * 4


@pytest.mark.parametrize("name", ["longrope, partly rotated, tied", "longrope, gelu"])
def test_longrope_beyond_the_original_context(name: str, tmp_path: Path) -> None:
    config = cases("phi3")[name]()
    config.rope_parameters["original_max_position_embeddings"] = config.original_max_position_embeddings = 16
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(tmp_path)
    ids = random_ids(1, 40, 67)
    with torch.no_grad():
        truth = theirs(ids, use_cache=False).logits
    ours = lamina.load(tmp_path, device="cpu", context=256)
    assert ours.context == 256
    assert relative(ours(ids), truth) < TOLERANCE
    assert relative(lamina.load(tmp_path, device="cpu")(ids), truth) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        ("gemma3_text", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
        ("gemma4_text", dict(use_bidirectional_attention="all"), "use_bidirectional_attention='all'"),
        ("gemma4_text", dict(per_layer_config={"1": {"sliding_window": 3}}), "sliding_window=3"),
        ("gemma4_text", dict(num_kv_shared_layers=3), "num_kv_shared_layers=3"),
        ("gemma3n_text", dict(activation_sparsity_pattern=[0.5]), r"activation_sparsity_pattern=\[0.5\]"),
        ("diffllama", dict(num_key_value_heads=1), "num_key_value_heads=1"),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        ("llama", dict(rope_scaling=dict(type="spiral")), "rope_type='spiral'"),
        (
            "llama",
            dict(rope_scaling=dict(type="dynamic", factor=2.0, original_max_position_embeddings=64)),
            "original_max_position_embeddings=64",
        ),
        ("llama", dict(hidden_act="mish"), "hidden_act='mish'"),
        ("mamba", dict(hidden_act="mish"), "hidden_act='mish'"),
        ("gpt_neox", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        ("olmo3", dict(rope_parameters=dict(rope_type="linear", factor=2.0)), "rope_parameters="),
        ("qwen2_moe", dict(layer_types=["sliding_attention"] * 4, num_experts=4), "use_sliding_window=False"),
        ("deepseek_v3", dict(qk_rope_head_dim=4), "head_dim=8"),
        ("gpt2", dict(n_embd=64, n_layer=2, n_head=4), "n_embd=64 and hidden_size=32"),
        ("mixtral", dict(num_local_experts=4, num_experts=8), "num_local_experts=4 and num_experts=8"),
    ],
)
def test_options_that_are_not_implemented_are_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        built({"model_type": model_type, **SIZES, "head_dim": 8, **changes})


@pytest.mark.parametrize("model_type", dense_a.FAMILIES)
def test_every_field_that_transformers_writes_is_read(model_type: str) -> None:
    for name, options in dense_a.FAMILIES[model_type].items():
        config = Config(json.loads(options().to_json_string()))
        with torch.device("meta"):
            family(model_type).build(config)
        assert set(config.unread) <= {"model_type"}, name
