from __future__ import annotations

from typing import Any

from transformers import LlamaConfig


def make(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=67, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaConfig(**settings | changes)


CASES = {
    "grouped": make,
    "tied, biases, own head dim": lambda: make(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16, num_key_value_heads=1
    ),
    "llama3 rope": lambda: make(
        num_key_value_heads=4,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}
