"""Gemma 3, the text model: every sixth layer attends to all tokens, the others to a window, each kind with its own
RoPE. Queries and keys are normed, and nothing is soft-capped.

https://arxiv.org/abs/2503.19786
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.attention.window import Full, Window
from lamina.config import Config
from lamina.models.gemma2 import Gemma2
from lamina.models.transformer import ropes_by_type, window_by_type, with_ropes_by_type
from lamina.nn import RMSNorm, Rotary, SelfAttention


class Gemma3(Gemma2):
    no_effect = ("_sliding_window_pattern",)
    defaults = {  # config.json of multimodal releases has few fields of the text model
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
    }

    @classmethod
    def complete(cls, config: Config) -> Config:
        return with_ropes_by_type(super().complete(config), 1e6, 1e4)

    def __init__(self, c: Config) -> None:
        c.require("attn_logit_softcapping", (None,))
        c.ignore("_sliding_window_pattern")  # which `layer_types` repeats
        super().__init__(c)

    def make_window(self, c: Config, layer: int) -> Window:
        return window_by_type(c, layer, every=c.get("sliding_window_pattern", 6), default=4096)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        kind = "full_attention" if self.make_window(c, layer) == Full() else "sliding_attention"
        q_norm, k_norm = (RMSNorm(c.head_width, c.get(*self.eps), plus_one=True) for _ in range(2))
        return super().make_attention(c, layer, **dict(rope=kind, q_norm=q_norm, k_norm=k_norm) | options)

    def make_rope(self, c: Config) -> Mapping[str, Rotary]:
        return ropes_by_type(c, c.head_width)
