from __future__ import annotations

from typing import Any

from transformers import Mamba2Config


def make(**changes: Any) -> Mamba2Config:
    settings: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=12, n_groups=2, chunk_size=16,
        vocab_size=67,
        initializer_range=0.3,  # large enough for the state to be heard in the logits
    )  # fmt: skip
    return Mamba2Config(**settings | changes)


CASES = {
    "grouped": make,
    "tied, biases, one group, long kernel": lambda: make(
        tie_word_embeddings=True, use_bias=True, n_groups=1, conv_kernel=7, expand=3, num_heads=6, head_dim=16
    ),
    "limited step sizes, a group a head": lambda: make(
        time_step_limit=(0.02, 0.05), n_groups=8, use_conv_bias=False, residual_in_fp32=False, layer_norm_epsilon=1e-3
    ),
    "gelu, kernel 2": lambda: make(hidden_act="gelu", conv_kernel=2, num_heads=4, head_dim=16, num_hidden_layers=3),
}
