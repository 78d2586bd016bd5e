"""Small random transformers models for the tests of the bridge."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from tests.families.cases import CASES

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
def model(name: str, seed: int = 0) -> Any:
    """A model with random weights that never ends a row by itself: of `CONFIGS`, or the first case of a family."""
    torch.manual_seed(seed)
    config = CONFIGS[name]() if name in CONFIGS else next(iter(CASES[name].values()))()
    with torch.inference_mode(False):  # tests share the model, and some run with gradients
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


def cache_argument(name: str) -> str:
    """What a model's forward calls its cache."""
    return "cache_params" if name in ("mamba", "mamba2", "falcon_mamba") else "past_key_values"


def ids(rows: int = 2, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask, in which the first row is padded on the left."""
    given = torch.randint(1, 60, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(given)
    if rows > 1:
        mask[0, :3] = 0
    return given, mask
