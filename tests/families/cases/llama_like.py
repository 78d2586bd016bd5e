"""Families that are Llama with other options."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=67, max_position_embeddings=256,
)  # fmt: skip


def small(config: type[PreTrainedConfig], **changes: Any) -> Any:
    return partial(config, **SIZES | changes)


FAMILIES = {
    "mistral": {
        "sliding": small(MistralConfig, sliding_window=7),
        "full, own head dim": small(MistralConfig, sliding_window=None, head_dim=16, num_key_value_heads=1),
        "tied, yarn": small(
            MistralConfig, sliding_window=5, tie_word_embeddings=True,
            rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64),
        ),
    },
    "qwen2": {
        "full": small(Qwen2Config),
        "sliding from layer 1, tied": small(
            Qwen2Config, num_hidden_layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1,
            tie_word_embeddings=True,
        ),
        "listed layers": small(
            Qwen2Config, use_sliding_window=True, sliding_window=6, num_key_value_heads=4,
            layer_types=["sliding_attention", "full_attention"],
        ),
    },
    "qwen3": {
        "own head dim": small(Qwen3Config, head_dim=16),
        "biases, tied, sliding": small(
            Qwen3Config, head_dim=8, attention_bias=True, tie_word_embeddings=True, use_sliding_window=True,
            sliding_window=6, max_window_layers=0,
        ),
        "one key head, dynamic rope": small(
            Qwen3Config, head_dim=8, num_key_value_heads=1, rms_norm_eps=1e-4,
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
        ),
    },
}  # fmt: skip
