from __future__ import annotations

from typing import Any

from transformers import Lfm2Config


def make(**changes: Any) -> Lfm2Config:
    settings: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        block_multiple_of=16, vocab_size=67, max_position_embeddings=256, tie_word_embeddings=False,
        layer_types=["conv", "full_attention", "conv"],
    )  # fmt: skip
    return Lfm2Config(**settings | changes)


CASES = {
    "grouped, untied": make,
    "tied, biases, wide kernel, width as given": lambda: make(
        tie_word_embeddings=True, conv_bias=True, conv_L_cache=5, block_auto_adjust_ff_dim=False, num_key_value_heads=1
    ),
    "layers by index, own head dim, stretched width": lambda: make(
        layer_types=None, full_attn_idxs=[0, 2], head_dim=16, block_ffn_dim_multiplier=1.3
    ),
}
