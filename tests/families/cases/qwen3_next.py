from __future__ import annotations

from typing import Any

from transformers import Qwen3NextConfig


def make(**changes: Any) -> Qwen3NextConfig:
    settings: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, vocab_size=67, max_position_embeddings=256, rms_norm_eps=1e-5,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=20,
    )  # fmt: skip
    return Qwen3NextConfig(**settings | changes)


CASES = {
    "grouped": make,
    "tied, biases, one expert, weights as they are": lambda: make(
        tie_word_embeddings=True, attention_bias=True, num_key_value_heads=1, linear_num_value_heads=2,
        linear_conv_kernel_dim=2, num_experts_per_tok=1, norm_topk_prob=False, partial_rotary_factor=0.5,
    ),
    "every third layer attends, some layers dense": lambda: make(
        num_hidden_layers=4, layer_types=None, full_attention_interval=3, decoder_sparse_step=2, mlp_only_layers=[3],
    ),
}  # fmt: skip
