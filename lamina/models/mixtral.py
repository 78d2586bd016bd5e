"""Mixtral, Phi-3.5-MoE and MiniMax-M2: Llama with a mixture of experts instead of the MLP in every layer.

https://arxiv.org/abs/2401.04088  https://arxiv.org/abs/2409.12136 (sparsemixer)
"""

from __future__ import annotations

from typing import Any

from lamina.attention.window import Full, Sliding, Window
from lamina.checkpoint.names import Either
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.transformer import Transformer
from lamina.nn import Choice, LayerNorm, Mixture, Norm, RMSNorm, Rotary, SelfAttention
from lamina.nn.moe.names import expert_names

LAYERS = "model.layers.{i}.block_sparse_moe", "model.layers.{i}.mlp"
"""Prefix of a mixture in published files, and as transformers 5 holds it."""


class Mixtral(Transformer):
    names = Transformer.names | {
        "blocks.{i}.mlp.router": Either(*(f"{layer}.gate" for layer in LAYERS), f"{LAYERS[1]}.router"),
        "blocks.{i}.mlp.router.bias": Either(*(f"{layer}.e_score_correction_bias" for layer in LAYERS)),
        **expert_names("blocks.{i}.mlp.experts", *(f"{layer}.experts" for layer in LAYERS), parts=("w1", "w3", "w2")),
    }
    eps = ("rms_norm_eps", 1e-5)
    rope_base = 1_000_000.0
    each = 2
    """Default of `num_experts_per_tok`."""

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(bias=False, out_bias=False) | options)

    def make_window(self, c: Config, layer: int) -> Window:
        size = c.get("sliding_window")
        return Full() if size is None else Sliding(size)

    def make_mlp(self, c: Config, layer: int) -> Mixture:
        return self.make_mixture(c, Choice(c.get("num_experts_per_tok", self.each), normed=True))

    def make_mixture(self, c: Config, choice: Choice, **options: Any) -> Mixture:
        experts = c.either("num_local_experts", "num_experts")
        return Mixture(c.hidden_size, experts, c.intermediate_size, c.get(*self.act), choice, **options)


class PhiMoe(Mixtral):
    """Layer norms, and a router whose weights depend on how near the other experts' logits are."""

    def make_norm(self, c: Config) -> Norm:
        return LayerNorm(c.hidden_size, c.get(*self.eps))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        bias = c.get("attention_bias", False)
        return super().make_attention(c, layer, bias=bias, out_bias=bias, **options)

    def make_rope(self, c: Config) -> Rotary:
        """Longrope has a factor on cos and sin for each of its two ranges; its long frequencies are never used by
        transformers, which therefore is not the truth for rows beyond the trained context."""
        rope = Rotary.of(c, c.head_width, self.rope_base, more=("short_mscale", "long_mscale"))
        settings = rope.settings
        if settings["rope_type"] == "longrope":
            long = (settings.get("longest") or 0) > settings["original_max_position_embeddings"]
            scale = settings.get("long_mscale" if long else "short_mscale")
            if scale is not None:
                rope = Rotary(rope.dim, settings | {"attention_factor": scale}, rope.max_positions)
        return rope

    def make_mlp(self, c: Config, layer: int) -> Mixture:
        if (each := c.get("num_experts_per_tok", 2)) != 2:
            raise InputError(f"num_experts_per_tok={each} in the configuration: this router chooses 2")
        return self.make_mixture(c, Choice(2, "sparsemixer", jitter=c.get("router_jitter_noise", 0.01)))


class MiniMaxM2(Mixtral):
    """Norms of all queries and of all keys together, RoPE on a part of each head, sigmoid scores."""

    eps = ("rms_norm_eps", 1e-6)
    rope_base = 5_000_000.0

    def __init__(self, c: Config) -> None:
        for name in ("use_qk_norm", "use_routing_bias"):  # in published files; transformers reads none of these
            c.require(name, (True,), True)
        c.require("qk_norm_type", ("per_layer",), "per_layer")
        c.require("sliding_window", (None,))
        c.require("shared_intermediate_size", (0,), 0)
        if set(kinds := c.get("attn_type_list", ())) > {1}:
            raise InputError(f"attn_type_list={kinds} in the configuration must be 1 (softmax attention) everywhere")
        super().__init__(c)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        dim, eps = c.get("head_dim", 128), c.get(*self.eps)
        q_norm, k_norm = (RMSNorm(n * dim, eps) for n in (c.num_attention_heads, c.num_key_value_heads))
        return super().make_attention(c.with_values(head_dim=dim), layer, q_norm=q_norm, k_norm=k_norm, **options)

    def make_rope(self, c: Config) -> Rotary:
        dim = c.get("head_dim", 128)
        return Rotary.of(c, dim, self.rope_base, partial=c.get("rotary_dim", dim) / dim)

    def make_mlp(self, c: Config, layer: int) -> Mixture:
        c.require("scoring_func", ("sigmoid",), "sigmoid")
        choice = Choice(c.get("num_experts_per_tok", 8), "sigmoid", normed=True)
        return self.make_mixture(c, choice, balanced=True)
