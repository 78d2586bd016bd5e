"""Every shape of the benchmark, small enough for a test."""

from __future__ import annotations

from typing import Any

from lamina.bench import SHAPES

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
}  # fmt: skip

NAMES = list(SHAPES)


def small(name: str) -> dict[str, Any]:
    return dict(SHAPES[name].config) | CHANGES[name] | {"vocab_size": 67}
