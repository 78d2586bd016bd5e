"""Every shape of the benchmark, small enough for a test."""

from __future__ import annotations

from typing import Any

from lamina.bench import SHAPES
from lamina.models import known_types

TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
CHANGES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
    "gemma-2-9b": dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=8,
    ),
    "mamba2-2.7b": dict(hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8),
    "falcon-h1-7b": dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
    ),
    "qwen3-next": dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    "deepseek-v2-lite": dict(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8,
    ),
    "smollm2-135m": dict(
        hidden_size=36, intermediate_size=48, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3
    ),
    "mistral-7b": TINY,
    "qwen3-8b": TINY | dict(head_dim=8),
    "gemma-3-12b": TINY
    | dict(head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "qwen3-30b-a3b": TINY | dict(head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16),
    "gpt-oss-20b": TINY
    | dict(
        head_dim=8, intermediate_size=16, num_local_experts=8, num_experts_per_tok=3, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "nemotron-h-8b": TINY
    | dict(
        num_hidden_layers=3, hybrid_override_pattern="M*-", head_dim=8, mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=8, n_groups=2,
    ),
    "granite-4.0-h-small": TINY
    | dict(
        intermediate_size=16, shared_intermediate_size=16, layer_types=["mamba", "attention"], num_local_experts=8,
        num_experts_per_tok=3, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
    ),
    "recurrentgemma-9b": TINY | dict(num_hidden_layers=3, num_key_value_heads=1, lru_width=32, attention_window_size=8),
    "falcon-mamba-7b": dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, state_size=4, time_step_rank=4
    ),
    "mamba-2.8b": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, state_size=4, time_step_rank=4),
    "whisper-large-v3": dict(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20, max_target_positions=200,
        decoder_start_token_id=5, pad_token_id=6,
    ),
}  # fmt: skip

NAMES = [name for name, shape in SHAPES.items() if shape.source is None and shape.config["model_type"] in known_types()]
"""Decoders alone."""


def small(name: str) -> dict[str, Any]:
    return dict(SHAPES[name].config) | CHANGES[name] | {"vocab_size": 67}
