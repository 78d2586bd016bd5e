"""Gemma 2: sliding-window and full attention in turn; attention scores and logits are soft-capped.

    x + norm(attention(norm(x)))        x + norm(mlp(norm(x)))

https://arxiv.org/abs/2408.00118
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lamina.attention.window import Window
from lamina.config import Config
from lamina.models.gemma import Gemma
from lamina.models.transformer import window_by_type
from lamina.nn import SelfAttention


class Gemma2(Gemma):
    names = Gemma.names | {
        "blocks.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
        "blocks.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
        "blocks.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
    }
    defaults = {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    no_effect: tuple[str, ...] = ("sliding_window_size", "hidden_act")  # `sliding_window`, `hidden_activation` again
    order = "both"
    act = ("hidden_activation", "gelu_pytorch_tanh")

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.softcap = c.get("final_logit_softcapping")

    def make_window(self, c: Config, layer: int) -> Window:
        return window_by_type(c, layer, every=2, default=4096)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        scale, softcap = c.query_pre_attn_scalar**-0.5, c.get("attn_logit_softcapping")
        return super().make_attention(c, layer, **dict(scale=scale, softcap=softcap) | options)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), softcap=self.softcap)
