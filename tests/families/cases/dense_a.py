"""Dense attention families, Apertus to Phi."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import (
    ApertusConfig,
    ArceeConfig,
    BitNetConfig,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    DiffLlamaConfig,
    Exaone4Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    GraniteConfig,
    Ministral3Config,
    MinistralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
)  # fmt: skip

SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=67, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3: dict[str, Any] = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
YARN: dict[str, Any] = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
GEMMA3N: dict[str, Any] = dict(
    head_dim=8, vocab_size_per_layer_input=67, hidden_size_per_layer_input=6, altup_num_inputs=4, laurel_rank=5
)
GEMMA4: dict[str, Any] = dict(
    head_dim=8, global_head_dim=16, vocab_size_per_layer_input=67, hidden_size_per_layer_input=6
)


def small(config: type[PreTrainedConfig], **changes: Any) -> Any:
    return partial(config, **SIZES | changes)


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    """The original context is longer than the rows of the tests."""
    factors = dict(short_factor=[1.0 + 0.3 * i for i in range(pairs)], long_factor=[5.0 + i for i in range(pairs)])
    return dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=64, **factors, **more)


FAMILIES = {
    "gemma": {
        "typical": small(GemmaConfig, head_dim=16),
        "gelu by its old name, untied": small(GemmaConfig, head_dim=8, hidden_act="gelu", tie_word_embeddings=False),
        "one key head, biases, linear rope": small(
            GemmaConfig, head_dim=16, num_key_value_heads=1, attention_bias=True, rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="linear", rope_theta=1e3, factor=4.0),
        ),
    },
    "gemma3_text": {
        "windows, two bases": small(
            Gemma3TextConfig, head_dim=16, sliding_window=6, num_hidden_layers=3, sliding_window_pattern=3,
            query_pre_attn_scalar=20,
        ),
        "scaled full layers, biases, untied, capped logits": small(
            Gemma3TextConfig, head_dim=8, sliding_window=5, layer_types=[FULL, SLIDING], attention_bias=True,
            tie_word_embeddings=False, final_logit_softcapping=2.0, query_pre_attn_scalar=8,
            rope_parameters={
                FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e5),
                SLIDING: dict(rope_type="default", rope_theta=500.0),
            },
        ),
        "every head its own keys, silu": small(
            Gemma3TextConfig, head_dim=8, num_key_value_heads=4, sliding_window=8, hidden_activation="silu",
            layer_types=[SLIDING, FULL], query_pre_attn_scalar=8,
        ),
    },
    "gemma3n_text": {
        "last layers share, wide inputs": small(
            Gemma3nTextConfig, **GEMMA3N, num_hidden_layers=6, num_kv_shared_layers=3, sliding_window=6,
            layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING],
            activation_sparsity_pattern=[0.6, 0.0, 0.0, 0.9, 0.0, 0.0],
        ),
        "three versions, the second active, nothing shared, untied": small(
            Gemma3nTextConfig, **GEMMA3N | dict(altup_num_inputs=3), altup_active_idx=1, altup_correct_scale=False,
            num_kv_shared_layers=0, sliding_window=5, layer_types=[FULL, SLIDING], tie_word_embeddings=False,
            attention_bias=True, final_logit_softcapping=2.0, intermediate_size=[24, 40],
        ),
        "scaled full layers, small second vocabulary": small(
            Gemma3nTextConfig, **GEMMA3N | dict(vocab_size_per_layer_input=50), num_hidden_layers=3,
            num_kv_shared_layers=1, sliding_window=8, num_key_value_heads=1, layer_types=[FULL, SLIDING, FULL],
            rope_parameters={
                FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e5),
                SLIDING: dict(rope_type="default", rope_theta=500.0),
            },
        ),
    },
    "gemma4_text": {
        "inputs of layers, last layers share": small(
            Gemma4TextConfig, **GEMMA4, num_hidden_layers=6, num_kv_shared_layers=3, sliding_window=6,
            layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL, FULL], use_double_wide_mlp=True,
            final_logit_softcapping=3.0,
        ),
        "values are keys, fewer key heads, experts": small(
            Gemma4TextConfig, **GEMMA4 | dict(hidden_size_per_layer_input=0), num_hidden_layers=3,
            layer_types=[SLIDING, FULL, FULL], attention_k_eq_v=True, num_global_key_value_heads=1, sliding_window=5,
            enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=20,
        ),
        "last layer full anyway, biases, untied": small(
            Gemma4TextConfig, **GEMMA4, sliding_window=8, layer_types=[FULL, SLIDING], attention_bias=True,
            tie_word_embeddings=False, use_bidirectional_attention="vision", hidden_activation="silu",
            rope_parameters={
                FULL: dict(rope_type="proportional", factor=4.0, rope_theta=1e3, partial_rotary_factor=0.5),
                SLIDING: dict(rope_type="default", rope_theta=500.0),
            },
        ),
    },
    "ministral": {
        "windows": small(MinistralConfig, sliding_window=7, head_dim=8),
        "listed layers, own head dim": small(
            MinistralConfig, sliding_window=5, head_dim=16, layer_types=[FULL, SLIDING], tie_word_embeddings=True
        ),
        "full": small(MinistralConfig, sliding_window=5, layer_types=[FULL, FULL], num_key_value_heads=1, head_dim=8),
    },
    "ministral3": {
        "yarn, growing queries": small(
            Ministral3Config, head_dim=8,
            rope_parameters=dict(**YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5),
        ),
        "windows, tied": small(
            Ministral3Config, head_dim=16, sliding_window=6, tie_word_embeddings=True, num_key_value_heads=1,
            rope_parameters=dict(
                rope_type="default", rope_theta=1e4, llama_4_scaling_beta=0.3, original_max_position_embeddings=8
            ),
        ),
        "settings of its own": small(Ministral3Config, head_dim=8, rms_norm_eps=1e-3),
    },
    "phi": {
        "half of each head rotated": small(PhiConfig),
        "normed queries, relu, partly rotated": small(
            PhiConfig, qk_layernorm=True, hidden_act="relu", num_key_value_heads=4, layer_norm_eps=1e-3,
            rope_parameters=dict(rope_type="default", rope_theta=1e3, partial_rotary_factor=0.25),
        ),
        "linear rope, one key head": small(
            PhiConfig, num_key_value_heads=1,
            rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0, partial_rotary_factor=1.0),
        ),
    },
    "phi3": {
        "windows": small(Phi3Config, sliding_window=7, original_max_position_embeddings=256),
        "longrope, partly rotated, tied": small(
            Phi3Config, tie_word_embeddings=True, num_key_value_heads=1, original_max_position_embeddings=64,
            rope_parameters=longrope(2, partial_rotary_factor=0.5),
        ),
        "longrope, gelu": small(
            Phi3Config, hidden_act="gelu", rms_norm_eps=1e-3, original_max_position_embeddings=64,
            rope_parameters=longrope(4),
        ),
    },
    "granite": {
        "factors": small(
            GraniteConfig, embedding_multiplier=3.0, logits_scaling=2.5, residual_multiplier=0.4,
            attention_multiplier=0.2,
        ),
        "plain, biases": small(GraniteConfig, attention_bias=True, mlp_bias=True, attention_multiplier=0.3),
        "tied, llama3 rope": small(
            GraniteConfig, tie_word_embeddings=True, residual_multiplier=1.5, num_key_value_heads=1,
            rope_parameters=LLAMA3, original_max_position_embeddings=16,  # which wins
        ),
    },
    "cohere": {
        "tied": small(CohereConfig),
        "normed queries, biases": small(CohereConfig, use_qk_norm=True, attention_bias=True, logit_scale=0.8),
        "untied, yarn": small(
            CohereConfig, tie_word_embeddings=False, num_key_value_heads=1, layer_norm_eps=1e-3, rope_parameters=YARN
        ),
    },
    "cohere2": {
        "windows with rope, full without": small(Cohere2Config, sliding_window=6, sliding_window_pattern=2),
        "listed layers, biases, untied": small(
            Cohere2Config, sliding_window=5, num_hidden_layers=3, layer_types=[FULL, SLIDING, SLIDING],
            attention_bias=True, tie_word_embeddings=False, logit_scale=0.5,
        ),
        "one key head, linear rope": small(
            Cohere2Config, sliding_window=8, num_key_value_heads=1,
            rope_parameters=dict(rope_type="linear", rope_theta=1e3, factor=2.0),
        ),
    },
    "olmo": {
        "plain": small(OlmoConfig),
        "clipped, biases, tied": small(OlmoConfig, clip_qkv=0.1, attention_bias=True, tie_word_embeddings=True),
        "one key head, gelu, linear rope": small(
            OlmoConfig, num_key_value_heads=1, hidden_act="gelu",
            rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0),
        ),
    },
    "olmo2": {
        "plain": small(Olmo2Config),
        "biases, tied, every head its own keys": small(
            Olmo2Config, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=4, rms_norm_eps=1e-3
        ),
        "one key head, llama3 rope": small(Olmo2Config, num_key_value_heads=1, rope_parameters=LLAMA3),
    },
    "olmo3": {
        "windows, fourth layer full": small(Olmo3Config, sliding_window=6, num_hidden_layers=4),
        "full layers scaled": small(
            Olmo3Config, sliding_window=5, layer_types=[FULL, SLIDING], attention_bias=True,
            rope_parameters={FULL: YARN, SLIDING: dict(rope_type="default", rope_theta=1e4)},
        ),
        "tied, every head its own keys": small(
            Olmo3Config, sliding_window=8, tie_word_embeddings=True, num_key_value_heads=4, layer_types=[SLIDING, FULL]
        ),
    },
    "bitnet": {
        "plain": small(BitNetConfig),
        "biases, tied, silu": small(BitNetConfig, attention_bias=True, tie_word_embeddings=True, hidden_act="silu"),
        "one key head, llama3 rope": small(
            BitNetConfig, num_key_value_heads=1, rope_parameters=LLAMA3, rms_norm_eps=1e-3
        ),
    },
    "apertus": {
        "xielu": small(ApertusConfig, rope_parameters=LLAMA3, initializer_range=0.3),
        "biases, tied, settings of its own": small(
            ApertusConfig, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1, initializer_range=0.3
        ),
        "relu2": small(ApertusConfig, hidden_act="relu2", num_key_value_heads=4, rms_norm_eps=1e-3),
    },
    "arcee": {
        "typical": small(ArceeConfig),
        "biases, tied, own head dim": small(
            ArceeConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=16
        ),
        "yarn, gelu": small(ArceeConfig, hidden_act="gelu", num_key_value_heads=1, rope_parameters=YARN),
    },
    "cwm": {
        "windows, every fourth layer full": small(CwmConfig, head_dim=8, sliding_window=6, rope_parameters=LLAMA3),
        "listed layers, tied": small(
            CwmConfig, head_dim=16, sliding_window=5, layer_types=[SLIDING, FULL], tie_word_embeddings=True
        ),
        "biases, one key head": small(CwmConfig, head_dim=8, sliding_window=8, mlp_bias=True, num_key_value_heads=1),
    },
    "diffllama": {
        "grouped": small(DiffLlamaConfig),
        "biases, tied, every head its own keys": small(
            DiffLlamaConfig, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=4, rms_norm_eps=1e-3
        ),
        "own head dim, llama3 rope, two groups": small(
            DiffLlamaConfig, head_dim=16, num_attention_heads=8, num_key_value_heads=4, rope_parameters=LLAMA3,
            num_hidden_layers=3, lambda_std_dev=0.3,
        ),
    },
    "exaone4": {
        "windows with rope, full without": small(
            Exaone4Config, sliding_window=6, sliding_window_pattern=2, num_hidden_layers=3
        ),
        "full with rope, tied": small(
            Exaone4Config, sliding_window=None, layer_types=[FULL, FULL], tie_word_embeddings=True,
            num_key_value_heads=1,
        ),
        "listed layers, llama3 rope": small(
            Exaone4Config, sliding_window=5, layer_types=[FULL, SLIDING], num_key_value_heads=4, rope_parameters=LLAMA3,
            rms_norm_eps=1e-3,
        ),
    },
}  # fmt: skip
