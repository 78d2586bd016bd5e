"""Families with experts."""

from __future__ import annotations

from typing import Any

from transformers import (
    AfmoeConfig,
    DeepseekV2Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    FlexOlmoConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    LongcatFlashConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SolarOpenConfig,
)

from tests.families.cases.llama_like import small

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
DEEPSEEK = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10,
    moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=3, first_k_dense_replace=1,
)  # fmt: skip
NOAUX = dict(moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=3, first_k_dense_replace=1)
EXPERTS = dict(moe_intermediate_size=20, n_routed_experts=8, num_experts_per_tok=3)
NOAUX_LATENT = DEEPSEEK | NOAUX
del NOAUX_LATENT["first_k_dense_replace"]
EXAONE = dict(moe_intermediate_size=20, num_experts=8, num_experts_per_tok=3)
ERNIE = dict(moe_intermediate_size=20, moe_num_experts=4, moe_k=2)
LONGCAT = DEEPSEEK | dict(
    ffn_hidden_size=40, expert_ffn_hidden_size=24, moe_topk=3, zero_expert_num=4, num_layers=2, head_dim=4,
)  # fmt: skip
for name in ("moe_intermediate_size", "num_experts_per_tok", "first_k_dense_replace"):
    del LONGCAT[name]


def longcat(**changes: Any) -> Any:
    made = small(LongcatFlashConfig, **LONGCAT | changes)
    for name in ("intermediate_size", "num_hidden_layers"):
        made.keywords.pop(name)
    return made


FAMILIES = {
    "mixtral": {
        "full": small(MixtralConfig, num_local_experts=4),
        "sliding, own head dim, tied": small(
            MixtralConfig, num_local_experts=4, sliding_window=6, head_dim=16, tie_word_embeddings=True,
            num_experts_per_tok=3,
        ),
        "one key head, gelu": small(
            MixtralConfig, num_local_experts=3, num_key_value_heads=1, hidden_act="gelu", rms_norm_eps=1e-3
        ),
    },
    "phimoe": {
        "plain": small(PhimoeConfig, num_local_experts=4),
        "biases, tied, wide jitter": small(
            PhimoeConfig, num_local_experts=6, attention_bias=True, lm_head_bias=True, tie_word_embeddings=True,
            router_jitter_noise=0.4,
        ),
        "sliding, longrope": small(
            PhimoeConfig, num_local_experts=4, sliding_window=7, rope_parameters=dict(
                rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.2, 1.5, 2.0],
                long_factor=[1.0, 2.0, 3.0, 4.0], short_mscale=1.1, long_mscale=1.3,
                original_max_position_embeddings=64,
            ),
        ),
    },
    "minimax_m2": {
        "partial rope": small(MiniMaxM2Config, num_local_experts=4, num_experts_per_tok=2, head_dim=8, rotary_dim=4),
        "full rope, tied": small(
            MiniMaxM2Config, num_local_experts=4, num_experts_per_tok=1, head_dim=16, tie_word_embeddings=True
        ),
        "one key head": small(
            MiniMaxM2Config, num_local_experts=6, num_experts_per_tok=3, head_dim=8, num_key_value_heads=1
        ),
    },
    "qwen2_moe": {
        "shared expert": small(
            Qwen2MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20,
            shared_expert_intermediate_size=24,
        ),
        "dense layers, no biases, normed": small(
            Qwen2MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, qkv_bias=False,
            shared_expert_intermediate_size=16, norm_topk_prob=True, num_hidden_layers=4, decoder_sparse_step=2,
            mlp_only_layers=[1],
        ),
        "sliding, tied": small(
            Qwen2MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, sliding_window=6,
            shared_expert_intermediate_size=16, use_sliding_window=True, max_window_layers=1, tie_word_embeddings=True,
        ),
    },
    "qwen3_moe": {
        "normed": small(
            Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True,
            head_dim=16,
        ),
        "sliding, biases, tied": small(
            Qwen3MoeConfig, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=20, use_sliding_window=True,
            sliding_window=6, attention_bias=True, tie_word_embeddings=True,
        ),
        "dense layers": small(
            Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, num_hidden_layers=3,
            mlp_only_layers=[0, 2], num_key_value_heads=4,
        ),
    },
    "olmoe": {
        "plain": small(OlmoeConfig, num_experts=4, num_experts_per_tok=2, eos_token_id=1),
        "clipped, normed, tied": small(
            OlmoeConfig, num_experts=4, num_experts_per_tok=2, clip_qkv=0.5, norm_topk_prob=True,
            tie_word_embeddings=True, eos_token_id=1,
        ),
        "biases, own keys": small(
            OlmoeConfig, num_experts=6, num_experts_per_tok=3, attention_bias=True, num_key_value_heads=None,
            eos_token_id=1,
        ),
    },
    "gpt_oss": {
        "sliding and full": small(
            GptOssConfig, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6,
            rope_parameters=YARN | {"truncate": False}, eos_token_id=1, pad_token_id=0,
        ),
        "no biases, tied, other order": small(
            GptOssConfig, num_local_experts=4, num_experts_per_tok=3, head_dim=16, sliding_window=5,
            attention_bias=False, tie_word_embeddings=True, layer_types=["full_attention", "sliding_attention"],
            swiglu_limit=0.1, rope_parameters=dict(rope_type="default", rope_theta=1e4), eos_token_id=1, pad_token_id=0,
        ),
        "one key head": small(
            GptOssConfig, num_local_experts=4, num_experts_per_tok=1, head_dim=8, num_key_value_heads=1,
            num_hidden_layers=3, sliding_window=7, rope_parameters=YARN, eos_token_id=1, pad_token_id=0,
        ),
    },
    "afmoe": {
        "dense, then experts": small(
            AfmoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, head_dim=8, sliding_window=6,
            num_hidden_layers=4,
        ),
        "scaled embedding, tied": small(
            AfmoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, head_dim=16, sliding_window=6,
            mup_enabled=True, tie_word_embeddings=True, route_scale=1.7, num_dense_layers=0, num_shared_experts=1,
            global_attn_every_n_layers=2,
        ),
        "listed layers": small(
            AfmoeConfig, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=20, head_dim=8, sliding_window=5,
            layer_types=["full_attention", "sliding_attention"], num_key_value_heads=None,
        ),
    },
    "dots1": {
        "groups": small(Dots1Config, **NOAUX, n_shared_experts=1, n_group=4, topk_group=2, norm_topk_prob=True),
        "sliding, biases, tied": small(
            Dots1Config, **NOAUX, n_shared_experts=2, sliding_window=6, max_window_layers=1, attention_bias=True,
            tie_word_embeddings=True, num_hidden_layers=3,
        ),
        "no dense layer, scaled": small(
            Dots1Config, **NOAUX | dict(first_k_dense_replace=0), n_shared_experts=1, routed_scaling_factor=1.4,
            head_dim=16, num_key_value_heads=1,
        ),
    },
    "glm4_moe": {
        "partial rope": small(Glm4MoeConfig, **NOAUX, n_shared_experts=1),
        "norms of queries and keys, biases": small(
            Glm4MoeConfig, **NOAUX, n_shared_experts=1, use_qk_norm=True, attention_bias=True, head_dim=16,
            tie_word_embeddings=True,
        ),
        "groups, not normed": small(
            Glm4MoeConfig, **NOAUX, n_shared_experts=2, n_group=4, topk_group=2, norm_topk_prob=False,
            routed_scaling_factor=0.7, rope_parameters=dict(
                rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25
            ), head_dim=16,
        ),
    },
    "deepseek_v2": {
        "greedy": small(DeepseekV2Config, **DEEPSEEK),
        "limited groups, whole queries": small(
            DeepseekV2Config, **DEEPSEEK | dict(q_lora_rank=None), n_group=4, topk_group=2, n_shared_experts=1,
            topk_method="group_limited_greedy", routed_scaling_factor=1.3,
        ),
        "biases, yarn, tied": small(
            DeepseekV2Config, **DEEPSEEK, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
            rope_parameters=YARN | dict(mscale=0.8, mscale_all_dim=1.1),
        ),
    },
    "glm4_moe_lite": {
        "dense first": small(Glm4MoeLiteConfig, **NOAUX_LATENT, n_shared_experts=1),
        "groups, biases, tied": small(
            Glm4MoeLiteConfig, **NOAUX_LATENT, n_shared_experts=1, n_group=4, topk_group=2, attention_bias=True,
            tie_word_embeddings=True, rope_interleave=False,
        ),
        "all sparse, whole queries": small(
            Glm4MoeLiteConfig, **NOAUX_LATENT | dict(q_lora_rank=None), n_shared_experts=2,
            mlp_layer_types=["sparse", "sparse"], norm_topk_prob=False,
        ),
    },
    "solar_open": {
        "plain": small(SolarOpenConfig, **EXPERTS, n_shared_experts=1, head_dim=8),
        "groups, biases, tied": small(
            SolarOpenConfig, **EXPERTS, n_shared_experts=1, head_dim=16, n_group=4, topk_group=2, attention_bias=True,
            tie_word_embeddings=True,
        ),
        "scaled, not normed": small(
            SolarOpenConfig, **EXPERTS, n_shared_experts=2, head_dim=8, routed_scaling_factor=0.7, norm_topk_prob=False,
            num_key_value_heads=1, rope_parameters=YARN,
        ),
    },
    "exaone_moe": {
        "sliding": small(ExaoneMoeConfig, **EXAONE, sliding_window=6, num_hidden_layers=4),
        "groups, full, tied": small(
            ExaoneMoeConfig, **EXAONE, n_group=4, topk_group=2, tie_word_embeddings=True, sliding_window=5,
            layer_types=["full_attention", "sliding_attention"], first_k_dense_replace=0,
        ),
        "listed MLPs": small(
            ExaoneMoeConfig, **EXAONE, sliding_window=6, sliding_window_pattern=2, num_shared_experts=2,
            mlp_layer_types=["sparse", "dense"], routed_scaling_factor=0.8,
        ),
    },
    "mimo_v2_flash": {
        "sliding": small(
            MiMoV2FlashConfig, **EXPERTS, head_dim=12, v_head_dim=8, sliding_window=6, num_hidden_layers=3
        ),
        "biases, tied, no value scale": small(
            MiMoV2FlashConfig, **EXPERTS, head_dim=8, v_head_dim=12, sliding_window=5, attention_bias=True,
            tie_word_embeddings=True, attention_value_scale=None, mlp_layer_types=["sparse", "dense"],
        ),
        "groups, other order": small(
            MiMoV2FlashConfig, **EXPERTS, head_dim=12, v_head_dim=4, sliding_window=6, n_group=4, topk_group=2,
            layer_types=["sliding_attention", "full_attention"], routed_scaling_factor=1.4, num_key_value_heads=1,
        ),
    },
    "granitemoe": {
        "plain": small(GraniteMoeConfig, num_local_experts=4),
        "multipliers, tied": small(
            GraniteMoeConfig, num_local_experts=4, embedding_multiplier=3.0, logits_scaling=2.0,
            residual_multiplier=0.6, attention_multiplier=0.3, tie_word_embeddings=True,
        ),
        "biases, three experts": small(
            GraniteMoeConfig, num_local_experts=6, num_experts_per_tok=3, attention_bias=True, num_key_value_heads=1
        ),
    },
    "granitemoeshared": {
        "shared": small(
            GraniteMoeSharedConfig, num_local_experts=4, shared_intermediate_size=24, residual_multiplier=0.6
        ),
        "none shared": small(GraniteMoeSharedConfig, num_local_experts=4, embedding_multiplier=3.0),
        "tied, biases": small(
            GraniteMoeSharedConfig, num_local_experts=4, shared_intermediate_size=16, tie_word_embeddings=True,
            attention_bias=True, logits_scaling=3.0, attention_multiplier=0.2,
        ),
    },
    "ernie4_5_moe": {
        "dense, then experts": small(Ernie4_5_MoeConfig, **ERNIE),
        "biases, untied": small(Ernie4_5_MoeConfig, **ERNIE, use_bias=True, tie_word_embeddings=False),
        "every other layer, none shared": small(
            Ernie4_5_MoeConfig, **ERNIE, moe_layer_interval=2, moe_num_shared_experts=0, num_hidden_layers=4,
            moe_layer_start_index=0, moe_layer_end_index=2,
        ),
    },
    "hunyuan_v1_moe": {
        "plain": small(HunYuanMoEV1Config, num_experts=4, moe_topk=2, head_dim=8),
        "biases, tied": small(
            HunYuanMoEV1Config, num_experts=4, moe_topk=1, head_dim=16, attention_bias=True, tie_word_embeddings=True
        ),
        "per layer": small(HunYuanMoEV1Config, num_experts=4, moe_topk=[2, 3], num_key_value_heads=1, head_dim=8),
    },
    "flex_olmo": {
        "plain": small(FlexOlmoConfig, num_experts=4, num_experts_per_tok=2, eos_token_id=1, pad_token_id=0),
        "normed, biases": small(
            FlexOlmoConfig, num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True,
            eos_token_id=1, pad_token_id=0,
        ),
        "tied": small(
            FlexOlmoConfig, num_experts=5, num_experts_per_tok=1, tie_word_embeddings=True, num_key_value_heads=None,
            eos_token_id=1, pad_token_id=0,
        ),
    },
    "longcat_flash": {
        "identity experts": longcat(),
        "none, biases, tied": longcat(zero_expert_num=0, attention_bias=True, tie_word_embeddings=True, num_layers=1),
        "yarn, scaled": longcat(routed_scaling_factor=1.5, num_layers=1, rope_parameters=YARN),
    },
}  # fmt: skip
