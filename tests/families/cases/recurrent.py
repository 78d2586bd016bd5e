"""Recurrent families, and hybrids of recurrent layers and attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import FalconMambaConfig, JambaConfig, MiniMaxConfig, PreTrainedConfig, RecurrentGemmaConfig

SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=67, max_position_embeddings=256,
    initializer_range=0.3,  # large enough for states to be heard in the logits
)  # fmt: skip


def small(config: type[PreTrainedConfig], **changes: Any) -> Any:
    return partial(config, **SIZES | changes)


def only_recurrent(config: type[PreTrainedConfig], **changes: Any) -> Any:
    sizes = dict(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=67, initializer_range=0.3)
    return partial(config, **sizes | changes)


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
        "untied, biases, wider recurrence, one key head": small(
            RecurrentGemmaConfig, attention_window_size=5, block_types=["attention", "recurrent"], lru_width=48,
            attention_bias=True, num_key_value_heads=1, tie_word_embeddings=False, w_init_variance_scale=1.0,
        ),
        "long kernel, no cap to speak of, every head its own keys": small(
            RecurrentGemmaConfig, num_key_value_heads=None, conv1d_width=6, logits_soft_cap=100.0, num_hidden_layers=3,
            hidden_activation="gelu", rope_parameters={"rope_type": "default", "rope_theta": 1e3},
            block_types=["recurrent", "attention"], attention_window_size=9, w_init_variance_scale=1.0,
        ),
    },
    "jamba": {
        "attention in the middle, experts in layer 1": small(
            JambaConfig, num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, num_experts=4
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
