"""RoFormer as a decoder: BERT's layers with RoPE, which was introduced here.

https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina.activation import activation
from lamina.checkpoint.names import Either
from lamina.config import Config
from lamina.models.gpt import Gpt
from lamina.nn import Embedding, LayerNorm, Linear, PostNormBlock, Rotary, SelfAttention

LAYER = "roformer.encoder.layer.{i}"


class RoFormer(Gpt):
    names = {
        "embedding": "roformer.embeddings.word_embeddings",
        "types": "roformer.embeddings.token_type_embeddings.weight",
        "embedding_norm": "roformer.embeddings.LayerNorm",
        "project_in": "roformer.embeddings_project",
        "blocks.{i}.attention.qkv": tuple(f"{LAYER}.attention.self.{part}" for part in ("query", "key", "value")),
        "blocks.{i}.attention.out": f"{LAYER}.attention.output.dense",
        "blocks.{i}.attention_norm": f"{LAYER}.attention.output.LayerNorm",
        "blocks.{i}.mlp.up": f"{LAYER}.intermediate.dense",
        "blocks.{i}.mlp.down": f"{LAYER}.output.dense",
        "blocks.{i}.mlp_norm": f"{LAYER}.output.LayerNorm",
        "dense": "cls.predictions.transform.dense",
        "dense_norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions.decoder",
        "head.bias": Either("cls.predictions.decoder.bias", "cls.predictions.bias"),
    }
    ignored = ("roformer.encoder.embed_positions.weight", "cls.predictions.bias", "roformer.pooler.*")
    eps = ("layer_norm_eps", 1e-12)
    defaults = {"intermediate_size": 3072}
    act = ("hidden_act", "gelu")

    def __init__(self, c: Config) -> None:
        c.require("is_decoder", (True,), False)
        c.require("add_cross_attention", (False,), False)
        c.require("rotary_value", (False,), False)
        super().__init__(c)
        width, eps = c.get("embedding_size", c.hidden_size), c.get(*self.eps)
        self.max_positions = c.max_position_embeddings
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.embedding, self.head = Embedding(c.vocab_size, width), Linear(width, c.vocab_size)
        if c.get("tie_word_embeddings", self.tied):
            self.head.weight = self.embedding.weight
        self.types = nn.Parameter(torch.zeros(c.get("type_vocab_size", 2), width))
        self.embedding_norm, self.dense_norm = LayerNorm(width, eps), LayerNorm(width, eps)
        self.project_in = None if width == c.hidden_size else Linear(width, c.hidden_size)
        self.dense, self.dense_act = Linear(c.hidden_size, width), activation(c.get(*self.act))

    def make_block(self, c: Config, layer: int) -> nn.Module:
        attention, mlp = self.make_attention(c, layer), self.make_mlp(c, layer)
        return PostNormBlock(attention, mlp, attention_norm=self.make_norm(c), mlp_norm=self.make_norm(c))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(neighbours=True) | options)

    def make_rope(self, c: Config) -> Rotary:
        return Rotary(c.head_width, {"rope_type": "default", "rope_theta": 10_000.0})

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding_norm(self.embedding(ids) + self.types[0])
        return x if self.project_in is None else self.project_in(x)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.dense_norm(self.dense_act(self.dense(x))))
