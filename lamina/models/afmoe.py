"""AFMoE (Trinity): gated attention, sliding with RoPE or full without, and sigmoid-scored experts with a shared one.

https://www.arcee.ai/blog/the-trinity-manifesto
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.attention.window import Full, Window
from lamina.config import Config
from lamina.models.decoder import mlp_names
from lamina.models.transformer import Transformer, window_by_type
from lamina.nn import Choice, Mixture, RMSNorm, SelfAttention
from lamina.nn.moe.names import expert_names

LAYER = "model.layers.{i}"


class Afmoe(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention.qkv": tuple(f"{LAYER}.self_attn.{part}_proj" for part in ("q", "gate", "k", "v")),
        "blocks.{i}.attention_post_norm": f"{LAYER}.post_attention_layernorm",
        "blocks.{i}.mlp_norm": f"{LAYER}.pre_mlp_layernorm",
        "blocks.{i}.mlp_post_norm": f"{LAYER}.post_mlp_layernorm",
        "blocks.{i}.mlp.router.weight": f"{LAYER}.mlp.router.gate.weight",
        "blocks.{i}.mlp.router.bias": f"{LAYER}.mlp.expert_bias",
        **expert_names("blocks.{i}.mlp.experts", f"{LAYER}.mlp.experts"),
        **mlp_names("blocks.{i}.mlp.shared", f"{LAYER}.mlp.shared_experts"),
    }
    order = "both"
    eps = ("rms_norm_eps", 1e-5)

    def __init__(self, c: Config) -> None:
        c.require("attention_bias", (False,), False)
        super().__init__(c.with_values(head_dim=c.get("head_dim", 128)))
        self.factor = c.hidden_size**0.5 if c.get("mup_enabled", False) else 1.0

    def make_window(self, c: Config, layer: int) -> Window:
        return window_by_type(c, layer, every=c.get("global_attn_every_n_layers", 4), default=1024)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        q_norm, k_norm = (RMSNorm(c.head_width, c.get(*self.eps)) for _ in range(2))
        rope = None if self.make_window(c, layer) == Full() else "default"
        return super().make_attention(c, layer, q_norm=q_norm, k_norm=k_norm, gated=True, rope=rope, **options)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        if layer < c.get("num_dense_layers", 1):
            return super().make_mlp(c, layer)
        inner = c.moe_intermediate_size
        choice = Choice(c.get("num_experts_per_tok", 6), "sigmoid", normed=True, factor=c.get("route_scale", 1.0))
        shared = inner * c.get("num_shared_experts", 2)
        return Mixture(c.hidden_size, c.num_experts, inner, c.get(*self.act), choice, shared=shared, balanced=True)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.factor)
