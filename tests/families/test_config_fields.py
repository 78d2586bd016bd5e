"""No field of a configuration is ignored silently: every family reads each, or says that it has no effect."""

from __future__ import annotations

import pytest
import torch

from docs.families import config_of
from lamina.config import Config
from lamina.models import TEXT_PARTS, family_of, known_types

POSITIONS = {"max_position_embeddings", "n_positions", "context_length"}
"""Lengths of training: tables of positions are computed, so these bound nothing but `model.context`."""
UNREAD = {
    "exaone_moe": {"first_k_dense_replace"},  # where mlp_layer_types is not given
    "granitemoehybrid": {"rope_parameters.rope_theta"},  # without RoPE, unless position_embedding_type asks for it
    "kimi_linear": {"num_key_value_heads", "qk_head_dim", "head_dim"},  # sizes of latent attention are others
    "marian": {"decoder_vocab_size"},  # where embeddings are not shared
    "nemotron_h": {
        "sliding_window", "expand", "time_step_max", "time_step_limit", "mamba_proj_bias", "n_shared_experts",
        "moe_shared_expert_overlap", "num_nextn_predict_layers", "mtp_layers_block_type", "residual_in_fp32",
    },  # which its model in transformers does not read either, or only for initial weights
    "qwen2_moe": {"intermediate_size", "sliding_window"},  # of layers without experts, and with windows
    "qwen3_moe": {"intermediate_size"},
    "solar_open": {"intermediate_size"},  # every layer has experts
    "smollm3": {"use_sliding_window"},  # where sliding_window is given
    "t5": {"dense_act_fn", "is_gated_act"},  # derived from feed_forward_proj
    "whisper": {"use_weighted_layer_sum", "median_filter_width"},  # of classification, and of word times
    "zamba": {"time_step_min", "time_step_max"},  # of initial weights
    "zamba2": {
        "time_step_max", "use_conv_bias", "rope_parameters.rope_theta", "mamba_headdim", "kv_channels",
        "num_query_groups", "hybrid_layer_ids",
    },  # derived from others, unused by its model in transformers, or read with use_mem_rope alone
}  # fmt: skip


@pytest.mark.parametrize("model_type", [one for one in known_types() if one not in TEXT_PARTS])
def test_every_field_is_read_or_known_to_have_no_effect(model_type: str) -> None:
    config = Config(config_of(model_type))
    with torch.device("meta"):
        model = family_of(config).build(config)
    assert model.context is None or model.context > 0  # reads the length that a family was trained for
    assert set(config.unread) - POSITIONS - UNREAD.get(model_type, set()) == set()


def test_settings_of_rope_that_nobody_uses_are_unread() -> None:
    rope = dict(rope_type="linear", rope_theta=1e4, factor=2.0, beta_fast=32, twist=1)
    config = Config(config_of("llama") | {"rope_parameters": rope, "rope_theta": 5e4})
    with torch.device("meta"):
        family_of(config).build(config)
    assert {one for one in config.unread if "rope" in one} == {
        "rope_theta", "rope_parameters.beta_fast", "rope_parameters.twist"
    }  # fmt: skip
