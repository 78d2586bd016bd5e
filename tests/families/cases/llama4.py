from __future__ import annotations

from typing import Any

from transformers import Llama4TextConfig


def make(**changes: Any) -> Llama4TextConfig:
    settings: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=67,
        intermediate_size=24, intermediate_size_mlp=40, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=2, attention_chunk_size=7, floor_scale=6, attn_scale=0.3,
        max_position_embeddings=256,
    )  # fmt: skip
    return Llama4TextConfig(**settings | changes)


CASES = {
    "chunks, experts every other layer": make,
    "tied, biases, two experts a token in all layers, no norm of queries": lambda: make(
        tie_word_embeddings=True, attention_bias=True, num_key_value_heads=1, num_experts_per_tok=2,
        interleave_moe_layer_step=1, use_qk_norm=False, num_hidden_layers=2, no_rope_layer_interval=2,
    ),
    "llama3 rope, no tuning, every head its own keys, no experts": lambda: make(
        num_key_value_heads=4, head_dim=16, attn_temperature_tuning=False, moe_layers=[], attention_chunk_size=12,
        no_rope_layers=[0, 1, 1], num_hidden_layers=3,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}  # fmt: skip
