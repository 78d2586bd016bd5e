"""Gemma 2: sliding-window and full attention in turn; attention scores and logits are soft-capped.

    x + norm(attention(norm(x)))        x + norm(mlp(norm(x)))

https://arxiv.org/abs/2408.00118
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lamina.attention.window import Window
from lamina.config import Config
from lamina.models.transformer import Transformer, window_by_type
from lamina.nn import RMSNorm, SelfAttention


class Gemma2(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
        "blocks.{i}.mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
        "blocks.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
    }
    order = "both"
    tied = True
    act = ("hidden_activation", "gelu_pytorch_tanh")

    def __init__(self, c: Config) -> None:
        c.require("use_bidirectional_attention", (False,), False)
        super().__init__(c.with_values(head_dim=c.get("head_dim", 256)))
        self.softcap = c.said("final_logit_softcapping", 30.0)

    def make_norm(self, c: Config) -> RMSNorm:
        return RMSNorm(c.hidden_size, c.get("rms_norm_eps", 1e-6), plus_one=True)

    def make_window(self, c: Config, layer: int) -> Window:
        return window_by_type(c, layer, every=2, default=4096)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        scale, softcap = c.get("query_pre_attn_scalar", 256) ** -0.5, c.said("attn_logit_softcapping", 50.0)
        return super().make_attention(c, layer, scale=scale, softcap=softcap, **options)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.embedding.embedding_dim**0.5, rounded=True)  # rounded as it was in training

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), softcap=self.softcap)
