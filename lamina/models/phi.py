"""Phi 1 and 2: attention and MLP side by side after one LayerNorm; RoPE on half of each head; biases everywhere.

Phi 3 and 4 are Llama with fused q, k and v, and RoPE that is scaled by a factor per frequency (longrope).

https://arxiv.org/abs/2309.05463  https://arxiv.org/abs/2404.14219
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import MLP, LayerNorm, SelfAttention


class Phi(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_layernorm",
        "blocks.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_layernorm",
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.dense",
        "blocks.{i}.mlp.up": "model.layers.{i}.mlp.fc1",
        "blocks.{i}.mlp.down": "model.layers.{i}.mlp.fc2",
        "norm": "model.final_layernorm",
    }
    order = "parallel"
    eps = ("layer_norm_eps", 1e-5)
    act = ("hidden_act", "gelu_new")
    rope_partial = 0.5
    head_bias = True

    def make_norm(self, c: Config) -> LayerNorm:
        return LayerNorm(c.hidden_size, c.get(*self.eps))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        normed = c.get("qk_layernorm", False)
        q_norm, k_norm = (LayerNorm(c.head_width, c.get(*self.eps)) if normed else None for _ in range(2))
        return super().make_attention(c, layer, bias=True, out_bias=True, q_norm=q_norm, k_norm=k_norm, **options)

    def make_mlp(self, c: Config, layer: int) -> MLP:
        return MLP(c.hidden_size, c.intermediate_size, c.get(*self.act), bias=True)


class Phi3(Transformer):
    no_effect = ("original_max_position_embeddings",)
    names = Transformer.names | {
        "blocks.{i}.attention.qkv": "model.layers.{i}.self_attn.qkv_proj",
        "blocks.{i}.mlp.gate_up": "model.layers.{i}.mlp.gate_up_proj",
    }
    defaults = {"original_max_position_embeddings": 4096, "max_position_embeddings": 4096}
    eps = ("rms_norm_eps", 1e-5)
    rope_partial = 1.0

    @classmethod
    def complete(cls, config: Config) -> Config:
        """In early files longrope is called "su" or "yarn"."""
        c = super().complete(config)
        c.ignore("original_max_position_embeddings")  # read where RoPE is scaled
        for name in ("full_attn_mod", "interpolate_factor"):  # in Phi-4; transformers reads neither
            c.require(name, (1,), 1)
        for name in ("rope_parameters", "rope_scaling"):
            given = c.get(name)
            if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) in ("su", "yarn"):
                c = c.with_values(**{name: {**given, "rope_type": "longrope"}})
        return c

    def make_window(self, c: Config, layer: int) -> Window:
        size = c.get("sliding_window")
        return Full() if size is None else Sliding(size)
