from __future__ import annotations

from typing import Any

from transformers import DeepseekV3Config


def make(**changes: Any) -> DeepseekV3Config:
    settings: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, intermediate_size=48,
        vocab_size=67, max_position_embeddings=256, kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=10, moe_intermediate_size=20, n_routed_experts=8, n_group=4, topk_group=2,
        num_experts_per_tok=3, first_k_dense_replace=1,
    )  # fmt: skip
    return DeepseekV3Config(**settings | changes)


CASES = {
    "dense then experts in groups": make,
    "whole queries, biases, halves turned, tied": lambda: make(
        q_lora_rank=None, attention_bias=True, rope_interleave=False, tie_word_embeddings=True, num_hidden_layers=2,
        n_shared_experts=2, norm_topk_prob=False, num_attention_heads=2, num_key_value_heads=2,
    ),
    "yarn, one group, wide latent": lambda: make(
        attention_bias=True, n_group=1, topk_group=1, num_experts_per_tok=2, kv_lora_rank=40, qk_rope_head_dim=8,
        first_k_dense_replace=0, num_hidden_layers=2, routed_scaling_factor=1.3,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.8,
            "mscale_all_dim": 1.1,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    ),
}  # fmt: skip
