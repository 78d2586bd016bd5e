"""Small random transformers models for the tests of the bridge."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, sliding_window=6, query_pre_attn_scalar=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, sliding_window=6, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"] * 2
    ),
}


@cache
def model(name: str) -> Any:
    """A model with random weights that never ends a row by itself."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


def ids(rows: int = 2, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask, in which the first row is padded on the left."""
    given = torch.randint(1, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(given)
    if rows > 1:
        mask[0, :3] = 0
    return given, mask
