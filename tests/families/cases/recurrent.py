"""Recurrent families, and hybrids of recurrent layers and attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import (
    BambaConfig,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2MoeConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    Zamba2Config,
    ZambaConfig,
)

SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=67, max_position_embeddings=256,
    initializer_range=0.3,  # large enough for states to be heard in the logits
)  # fmt: skip
SMALL_WEIGHTS: dict[str, Any] = dict(initializer_range=0.15)  # with larger ones these magnify the rounding of bfloat16


def small(config: type[PreTrainedConfig], **changes: Any) -> Any:
    return partial(config, **SIZES | changes)


def only_recurrent(config: type[PreTrainedConfig], **changes: Any) -> Any:
    sizes = dict(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=67, initializer_range=0.3)
    return partial(config, **sizes | changes)


def small_rwkv(**changes: Any) -> Any:
    return partial(RwkvConfig, **dict(hidden_size=32, num_hidden_layers=2, vocab_size=67) | changes)


def small_kimi(**changes: Any) -> Any:
    sizes: dict[str, Any] = dict(
        num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"], linear_head_dim=8, linear_num_heads=3, kv_lora_rank=16,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=12, num_key_value_heads=4, pad_token_id=None,
    )  # fmt: skip
    return small(KimiLinearConfig, **sizes | changes)


def small_granite(**changes: Any) -> Any:
    sizes: dict[str, Any] = dict(
        num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], mamba_n_heads=8,
        mamba_d_state=12, mamba_n_groups=2, mamba_chunk_size=16, shared_intermediate_size=40, intermediate_size=24,
    )  # fmt: skip
    return small(GraniteMoeHybridConfig, **sizes | changes)


def small_nemotron(**changes: Any) -> Any:
    sizes: dict[str, Any] = dict(
        head_dim=8, mamba_num_heads=6, mamba_head_dim=8, ssm_state_size=12, n_groups=2, chunk_size=16,
        n_routed_experts=6, moe_intermediate_size=12, moe_shared_expert_intermediate_size=20,
    )  # fmt: skip
    given = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    return partial(NemotronHConfig, **given | sizes | changes)


def small_zamba(config: type[PreTrainedConfig], **changes: Any) -> Any:
    sizes: dict[str, Any] = dict(
        num_hidden_layers=3, layers_block_type=["hybrid", "linear_attention", "hybrid"], mamba_d_state=8,
        num_key_value_heads=4,
    )  # fmt: skip
    if config is Zamba2Config:
        sizes |= dict(adapter_rank=6, n_mamba_heads=8, chunk_size=16)
    return small(config, **sizes | changes)


def small_qwen(config: type[PreTrainedConfig], **changes: Any) -> Any:
    sizes: dict[str, Any] = dict(
        num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
    )  # fmt: skip
    given = dict(SIZES, initializer_range=0.05)
    if config is Qwen3_5MoeTextConfig:
        sizes |= dict(
            num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=20
        )
        del given["intermediate_size"]
    return partial(config, **given | sizes | changes)


def small_lfm(**changes: Any) -> Any:
    sizes: dict[str, Any] = dict(
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, num_experts=6,
        num_experts_per_tok=3, moe_intermediate_size=20,
    )  # fmt: skip
    return small(Lfm2MoeConfig, **sizes | changes)


FAMILIES = {
    "falcon_mamba": {
        "typical": only_recurrent(FalconMambaConfig),
        "untied, biases, long kernel, its own width": only_recurrent(
            FalconMambaConfig, tie_word_embeddings=False, use_bias=True, conv_kernel=7, intermediate_size=80,
            time_step_rank=5, mixer_rms_eps=1e-3,
        ),
        "no conv bias, plain residual": only_recurrent(
            FalconMambaConfig, use_conv_bias=False, conv_kernel=2, residual_in_fp32=False, num_hidden_layers=3
        ),
    },
    "minimax": {
        "full and linear in turn": small(MiniMaxConfig, block_size=16, num_local_experts=4),
        "tied, factors, listed layers, own head dim": small(
            MiniMaxConfig, num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"],
            block_size=9, num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True, head_dim=12,
            full_attn_alpha_factor=1.2, full_attn_beta_factor=0.7, linear_attn_alpha_factor=0.9,
            linear_attn_beta_factor=1.3, mlp_alpha_factor=0.8, mlp_beta_factor=1.1,
        ),
        "sliding, one key head, gelu": small(
            MiniMaxConfig, block_size=64, num_local_experts=4, sliding_window=6, num_key_value_heads=1,
            hidden_act="gelu", rms_norm_eps=1e-3,
        ),
    },
    "recurrent_gemma": {
        "two recurrent, one sliding": small(
            RecurrentGemmaConfig, num_hidden_layers=3, attention_window_size=7, w_init_variance_scale=1.0
        ),
        "untied, biases, wider recurrence and heads, one key head": small(
            RecurrentGemmaConfig, head_dim=16, attention_window_size=5, block_types=["attention", "recurrent"],
            lru_width=48, attention_bias=True, num_key_value_heads=1, tie_word_embeddings=False,
            w_init_variance_scale=1.0,
        ),
        "long kernel, no cap to speak of, every head its own keys": small(
            RecurrentGemmaConfig, num_key_value_heads=None, conv1d_width=6, logits_soft_cap=100.0, num_hidden_layers=3,
            hidden_activation="gelu", rope_parameters={"rope_type": "default", "rope_theta": 1e3},
            block_types=["recurrent", "attention"], attention_window_size=9, w_init_variance_scale=1.0,
        ),
    },
    "bamba": {
        "attention in the middle": small(
            BambaConfig, num_hidden_layers=3, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=12,
            mamba_n_groups=2, mamba_chunk_size=16,
        ),
        "tied, biases, no attention": small(
            BambaConfig, mamba_n_heads=4, mamba_d_state=8, mamba_d_conv=6, mamba_proj_bias=True, mlp_bias=True,
            tie_word_embeddings=True, time_step_limit=(0.02, 0.05), mamba_chunk_size=16,
        ),
        "attention first, biases, own head dim": small(
            BambaConfig, attn_layer_indices=[0], attention_bias=True, num_key_value_heads=1, mamba_n_heads=6,
            mamba_expand=3, mamba_d_state=8, mamba_conv_bias=False, mamba_chunk_size=16, rms_norm_eps=1e-3,
        ),
    },
    "granitemoehybrid": {
        "experts, no positions": small_granite(num_local_experts=4, **SMALL_WEIGHTS),
        "dense, rope, tied, factors": small_granite(
            num_local_experts=0, position_embedding_type="rope", tie_word_embeddings=True, embedding_multiplier=2.0,
            logits_scaling=3.0, residual_multiplier=0.7, attention_multiplier=0.4,
        ),
        "experts, factors, biases": small_granite(
            num_local_experts=3, num_experts_per_tok=1, residual_multiplier=0.5, attention_bias=True,
            mamba_proj_bias=True, mamba_conv_bias=False, num_key_value_heads=1, hidden_act="gelu",
            layer_types=["full_attention", "linear_attention"], num_hidden_layers=2,
        ),
    },
    "nemotron_h": {
        "one of each": small_nemotron(layers_block_type=["linear_attention", "full_attention", "mlp", "moe"]),
        "tied, biases, latent experts": small_nemotron(
            layers_block_type=["moe", "linear_attention", "moe"], moe_latent_size=20, mlp_bias=True, use_bias=True,
            tie_word_embeddings=True, n_group=2, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.7,
        ),
        "pattern, long kernel, wide state": small_nemotron(
            hybrid_override_pattern="M-*M", conv_kernel=6, ssm_state_size=20, use_conv_bias=False, n_groups=1,
            time_step_min=0.05, num_key_value_heads=4, mlp_hidden_act="silu", mamba_hidden_act="gelu",
        ),
    },
    "zamba": {
        "two heads, one shared layer used twice": small_zamba(ZambaConfig, num_key_value_heads=4, **SMALL_WEIGHTS),
        "untied, biases, three heads": small_zamba(
            ZambaConfig, n_mamba_heads=3, mamba_expand=3, mamba_proj_bias=True, tie_word_embeddings=False,
            mamba_dt_rank=5, mamba_d_conv=6, layers_block_type=["linear_attention", "hybrid"], num_hidden_layers=2,
        ),
        "one head, grouped keys, usual layers": small_zamba(
            ZambaConfig, n_mamba_heads=1, num_key_value_heads=1, layers_block_type=None, mamba_conv_bias=False,
            hidden_act="silu", num_hidden_layers=4, attn_layer_period=1, attn_layer_offset=0,
        ),
    },
    "zamba2": {
        "adapters of the MLP": small_zamba(Zamba2Config, **SMALL_WEIGHTS),
        "two shared layers, all adapters, rope": small_zamba(
            Zamba2Config, num_hidden_layers=4, num_mem_blocks=2, use_mem_rope=True, use_shared_attention_adapter=True,
            layers_block_type=["hybrid", "hybrid", "linear_attention", "hybrid"], adapter_rank=3, initializer_range=0.1,
        ),
        "untied, biases, groups": small_zamba(
            Zamba2Config, add_bias_linear=True, mamba_ngroups=2, tie_word_embeddings=False, mamba_d_conv=3,
            n_mamba_heads=4, intermediate_size=None, time_step_min=0.05, attention_head_dim=24,
        ),
    },
    "olmo_hybrid": {
        "delta and attention, no rope": small(
            OlmoHybridConfig, layer_types=["linear_attention", "full_attention"], pad_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": None},
        ),
        "tied, rope, biases, strengths up to one": small(
            OlmoHybridConfig, layer_types=["full_attention", "linear_attention"], tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4}, attention_bias=True, pad_token_id=None,
            linear_allow_neg_eigval=False, linear_conv_kernel_dim=3,
        ),
        "usual layers, shared keys": small(
            OlmoHybridConfig, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=6, linear_value_head_dim=5, num_key_value_heads=None, pad_token_id=None,
            rope_parameters=None,
        ),
    },
    "qwen3_5_text": {
        "dense": small_qwen(Qwen3_5TextConfig),
        "tied, biases, one key head": small_qwen(
            Qwen3_5TextConfig, tie_word_embeddings=True, attention_bias=True, num_key_value_heads=1,
            linear_num_value_heads=2, linear_conv_kernel_dim=2,
        ),
        "every third layer attends, more rope": small_qwen(
            Qwen3_5TextConfig, layer_types=None, full_attention_interval=3,
            rope_parameters=dict(
                rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]
            ),
        ),
    },
    "qwen3_5_moe_text": {
        "experts": small_qwen(Qwen3_5MoeTextConfig),
        "tied, one expert": small_qwen(
            Qwen3_5MoeTextConfig, tie_word_embeddings=True, num_experts_per_tok=1, num_hidden_layers=2,
            layer_types=["full_attention", "linear_attention"],
        ),
        "biases, more key heads": small_qwen(
            Qwen3_5MoeTextConfig, attention_bias=True, num_key_value_heads=4, linear_num_key_heads=4, num_experts=5,
        ),
    },
    "lfm2_moe": {
        "conv, attention, experts from layer 1": small_lfm(),
        "untied, no bias of experts, weights as they are": small_lfm(
            tie_word_embeddings=False, use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.5,
            num_key_value_heads=1,
        ),
        "experts everywhere, biases, long kernel": small_lfm(
            num_dense_layers=0, conv_bias=True, conv_L_cache=5, num_experts_per_tok=1
        ),
    },
    "kimi_linear": {
        "delta, latent, delta": small_kimi(),
        "tied, all layers dense, low-rank queries": small_kimi(
            q_lora_rank=20, mlp_layer_types=["dense"] * 3, tie_word_embeddings=True, linear_conv_kernel_dim=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "as published: layers counted from one, groups of experts": small_kimi(
            num_hidden_layers=2, mlp_layer_types=None, first_k_dense_replace=1, n_group=2, topk_group=1,
            norm_topk_prob=False, layer_types=None, linear_attn_config=dict(
                head_dim=6, num_heads=2, short_conv_kernel_size=4, full_attn_layers=[1], kda_layers=[2]
            ),
        ),
    },
    "rwkv": {
        "typical": small_rwkv(),
        "tied, halved after every layer": small_rwkv(tie_word_embeddings=True, rescale_every=1, num_hidden_layers=3),
        "wider attention, narrow MLP, never halved": small_rwkv(
            attention_hidden_size=48, intermediate_size=40, rescale_every=0, layer_norm_epsilon=1e-3
        ),
    },
    "jamba": {
        "attention in the middle, experts in layer 1": small(
            JambaConfig, num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, num_experts=4, **SMALL_WEIGHTS
        ),
        "tied, biases, no experts": small(
            JambaConfig, attn_layer_period=2, attn_layer_offset=0, num_experts=1, tie_word_embeddings=True,
            mamba_proj_bias=True, mamba_d_conv=6, mamba_dt_rank=5, num_key_value_heads=1,
        ),
        "experts everywhere, wide state": small(
            JambaConfig, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0,
            num_experts=5, num_experts_per_tok=1, mamba_d_state=20, mamba_expand=3, mamba_conv_bias=False,
            rms_norm_eps=1e-3,
        ),
    },
}  # fmt: skip
