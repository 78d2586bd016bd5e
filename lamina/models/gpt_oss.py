"""GPT-OSS: sliding and full attention in turn, with a learned sink per head; experts with biases and a clamped gate.

Published checkpoints store the experts in MXFP4, in which they stay.

https://arxiv.org/abs/2508.10925
"""

from __future__ import annotations

from typing import Any

from lamina.activation import Gating
from lamina.attention.window import Window
from lamina.config import Config
from lamina.models.transformer import Transformer, window_by_type
from lamina.nn import Choice, Mixture, Rotary, SelfAttention
from lamina.nn.moe.names import interleaved_stack_names

YARN = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)


class GptOss(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention.sinks": "model.layers.{i}.self_attn.sinks",
        "blocks.{i}.mlp.router.weight": "model.layers.{i}.mlp.router.weight",
        "blocks.{i}.mlp.router.logit_bias": "model.layers.{i}.mlp.router.bias",
        **interleaved_stack_names("blocks.{i}.mlp.experts", "model.layers.{i}.mlp.experts"),
    }
    no_effect = ("initial_context_length", "experts_per_token")
    eps = ("rms_norm_eps", 1e-5)
    rope_base = 150_000.0

    def __init__(self, c: Config) -> None:
        super().__init__(c.with_values(head_dim=c.get("head_dim", 64)))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        bias = c.get("attention_bias", True)
        return super().make_attention(c, layer, bias=bias, out_bias=bias, sinks=True, **options)

    def make_window(self, c: Config, layer: int) -> Window:
        return window_by_type(c, layer, every=2, default=128)

    def make_rope(self, c: Config) -> Rotary:
        scaled = c.get("rope_parameters") or c.get("rope_scaling")
        return Rotary.of(c if scaled else c.with_values(rope_parameters=YARN), c.head_width, self.rope_base)

    def make_mlp(self, c: Config, layer: int) -> Mixture:
        c.require("hidden_act", ("silu",), "silu")
        gating = Gating("silu", limit=c.get("swiglu_limit", 7.0), plus=1.0, slope=c.get("swiglu_alpha", 1.702))
        choice = Choice(c.either("num_experts_per_tok", "experts_per_token", default=4), normed=True)
        experts = c.either("num_local_experts", "num_experts")
        return Mixture(c.hidden_size, experts, c.intermediate_size, gating, choice, logit_bias=True, bias=True)
