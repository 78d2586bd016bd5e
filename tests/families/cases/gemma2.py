from __future__ import annotations

from typing import Any

from transformers import Gemma2Config


def make(**changes: Any) -> Gemma2Config:
    settings: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        head_dim=8, vocab_size=67, max_position_embeddings=256, sliding_window=8, query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    )  # fmt: skip
    return Gemma2Config(**settings | changes)


CASES = {
    "sliding and full in turn": make,
    "untied, biases, one key head": lambda: make(
        tie_word_embeddings=False, attention_bias=True, num_key_value_heads=1, head_dim=16, num_hidden_layers=2
    ),
    "no caps, other order, every head its own keys": lambda: make(
        attn_logit_softcapping=None, final_logit_softcapping=None, num_key_value_heads=4, query_pre_attn_scalar=20,
        sliding_window=5, num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
}  # fmt: skip
