from __future__ import annotations

from typing import Any

from transformers import MambaConfig


def make(**changes: Any) -> MambaConfig:
    settings: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=67,
        initializer_range=0.3,  # large enough for the state to be heard in the logits
    )  # fmt: skip
    return MambaConfig(**settings | changes)


CASES = {
    "typical": make,
    "untied, biases, long kernel, three times as wide": lambda: make(
        tie_word_embeddings=False, use_bias=True, conv_kernel=7, expand=3, time_step_rank=5, num_hidden_layers=3
    ),
    "width as given": lambda: make(intermediate_size=80, expand=2),
    "no conv bias, kernel 2, gelu, plain residual": lambda: make(
        use_conv_bias=False, conv_kernel=2, hidden_act="gelu", residual_in_fp32=False, layer_norm_epsilon=1e-3
    ),
}
