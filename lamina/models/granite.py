"""Granite: Llama with fixed multipliers on embeddings, attention scores, residual branches and logits.

https://www.ibm.com/granite
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import GatedMLP, SelfAttention


class Granite(Transformer):
    defaults = {"attention_multiplier": 1.0, "residual_multiplier": 1.0}

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.embedding_factor = c.get("embedding_multiplier", 1.0)
        self.head_factor = 1 / c.get("logits_scaling", 1.0)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        factors = dict(scale=c.attention_multiplier, factors=(1.0, c.residual_multiplier))
        return super().make_attention(c, layer, **factors | options)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        act, bias = c.get(*self.act), c.get("mlp_bias", False)
        return GatedMLP(c.hidden_size, c.intermediate_size, act, bias, factors=(1.0, c.residual_multiplier))

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.embedding_factor)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), scale=self.head_factor)
