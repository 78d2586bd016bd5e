from __future__ import annotations

from typing import Any

from transformers import FalconH1Config


def make(**changes: Any) -> FalconH1Config:
    settings: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        mamba_d_ssm=48, mamba_n_heads=6, mamba_n_groups=2, mamba_d_state=12, mamba_chunk_size=16, vocab_size=67,
        max_position_embeddings=256,
        initializer_range=0.3,  # large enough for the state to be heard in the logits
    )  # fmt: skip
    return FalconH1Config(**settings | changes)


def scaled(**changes: Any) -> FalconH1Config:
    factors: dict[str, Any] = dict(
        embedding_multiplier=2.5, lm_head_multiplier=0.4, key_multiplier=0.7, attention_in_multiplier=1.2,
        attention_out_multiplier=0.9, ssm_in_multiplier=1.3, ssm_out_multiplier=0.6, mlp_multipliers=[0.8, 1.1],
        ssm_multipliers=[0.9, 1.4, 0.5, 1.2, 0.7],
    )  # fmt: skip
    return make(**factors | changes)


CASES = {
    "factors": scaled,
    "plain, tied": lambda: make(tie_word_embeddings=True, mamba_d_ssm=None, mamba_n_heads=8, mamba_n_groups=1),
    "norm before gate, biases, own head dim": lambda: scaled(
        mamba_rms_norm=True, mamba_norm_before_gate=True, attention_bias=True, mlp_bias=True, mamba_proj_bias=True,
        projectors_bias=True, head_dim=16, num_key_value_heads=1, mamba_d_conv=6,
    ),
    "gate before norm, limited step sizes": lambda: make(
        mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_conv_bias=False, time_step_limit=(0.5, 1.5),
        num_key_value_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}  # fmt: skip
