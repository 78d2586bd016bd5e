"""ModernBERT as a decoder (Ettin): LayerNorm, sliding windows with their own RoPE base, a dense layer before the head.

https://arxiv.org/abs/2507.11412
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.activation import activation
from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.models.decoder import layer_types
from lamina.models.transformer import Transformer
from lamina.nn import Block, LayerNorm, Linear, Norm, Rotary, SelfAttention

KINDS = ("full_attention", "sliding_attention")
LAYER = "model.layers.{i}"


class ModernBertDecoder(Transformer):
    names = {
        "embedding": "model.embeddings.tok_embeddings",
        "embedding_norm": "model.embeddings.norm",
        "blocks.{i}.attention_norm": f"{LAYER}.attn_norm",
        "blocks.{i}.attention.qkv": tuple(f"{LAYER}.attn.{part}_proj" for part in "qkv"),
        "blocks.{i}.attention.out": f"{LAYER}.attn.Wo",
        "blocks.{i}.mlp_norm": f"{LAYER}.mlp_norm",
        "blocks.{i}.mlp.gate_up": f"{LAYER}.mlp.Wi",
        "blocks.{i}.mlp.down": f"{LAYER}.mlp.Wo",
        "norm": "model.final_norm",
        "dense": "lm_head.dense",
        "dense_norm": "lm_head.norm",
        "head": "decoder",
    }
    tied = True
    eps = ("norm_eps", 1e-5)
    act = ("hidden_activation", "gelu")

    def __init__(self, c: Config) -> None:
        self.head_bias = c.get("decoder_bias", True)  # type: ignore[misc]
        super().__init__(c)
        self.embedding_norm, self.dense_norm = self.make_norm(c), self.make_norm(c)
        self.dense = Linear(c.hidden_size, c.hidden_size, bias=c.get("classifier_bias", False))
        self.dense_act = activation(c.get("classifier_activation", "gelu"))

    def make_norm(self, c: Config) -> Norm:
        return LayerNorm(c.hidden_size, c.get(*self.eps), bias=c.get("norm_bias", False))

    def make_block(self, c: Config, layer: int) -> nn.Module:
        """The first layer has no norm: embeddings are normed."""
        norm = self.make_norm(c) if layer else None
        attention, mlp = self.make_attention(c, layer), self.make_mlp(c, layer)
        return Block(attention, mlp, attention_norm=norm, mlp_norm=self.make_norm(c))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(rope=kinds(c)[layer]) | options)

    def make_window(self, c: Config, layer: int) -> Window:
        """`sliding_window` is half of `local_attention`, and wins where a file has both."""
        both = c.get("local_attention", 128) // 2
        return Full() if kinds(c)[layer] == "full_attention" else Sliding(c.get("sliding_window", both))

    def make_rope(self, c: Config) -> dict[str, Rotary]:
        bases = c.get("global_rope_theta", 160_000.0), c.get("local_rope_theta", 10_000.0)
        return {kind: Rotary.of(c, c.head_width, base, kind=kind) for kind, base in zip(KINDS, bases, strict=True)}

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding_norm(super().embed(ids))

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.dense_norm(self.dense_act(self.dense(self.norm(x)))))


def kinds(c: Config) -> Any:
    every = c.get("global_attn_every_n_layers", 3)
    return layer_types(c, KINDS, lambda i: "sliding_attention" if i % every else "full_attention")
