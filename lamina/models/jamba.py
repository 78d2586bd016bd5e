"""Jamba: mostly Mamba layers with norms of step sizes, B and C; some layers attend (no RoPE), some have experts.

https://arxiv.org/abs/2403.19887
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from lamina.checkpoint.names import Either
from lamina.config import Config
from lamina.models.decoder import mlp_names, qkv_names
from lamina.models.transformer import Transformer
from lamina.nn import Choice, MambaMixer, Mixer, Mixture, RMSNorm, SelfAttention, mamba_names
from lamina.nn.moe.names import expert_names

LAYER = "model.layers.{i}"


class Jamba(Transformer):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norm": f"{LAYER}.input_layernorm",
        **qkv_names("blocks.{i}.attention", f"{LAYER}.self_attn"),
        **mamba_names("blocks.{i}.attention", f"{LAYER}.mamba"),
        "blocks.{i}.attention.out": Either(f"{LAYER}.self_attn.o_proj", f"{LAYER}.mamba.out_proj"),
        "blocks.{i}.mlp_norm": f"{LAYER}.pre_ff_layernorm",
        **mlp_names("blocks.{i}.mlp", f"{LAYER}.feed_forward"),
        "blocks.{i}.mlp.router": f"{LAYER}.feed_forward.router",
        **expert_names("blocks.{i}.mlp.experts", f"{LAYER}.feed_forward.experts"),
        "norm": "model.final_layernorm",
        "head": "lm_head",
    }

    no_effect = ("max_position_embeddings", "n_ctx")  # there is no RoPE

    def __init__(self, c: Config) -> None:
        c.require("mamba_inner_layernorms", (True,), True)  # in published files; transformers reads neither
        c.require("sliding_window", (None,))
        super().__init__(c)

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        if layer % c.get("attn_layer_period", 8) == c.get("attn_layer_offset", 4):
            return self.make_attention(c, layer)
        rank, state, eps = c.get("mamba_dt_rank", "auto"), c.get("mamba_d_state", 16), c.get(*self.eps)
        rank = math.ceil(c.hidden_size / 16) if rank == "auto" else rank
        return MambaMixer(
            c.hidden_size, c.get("mamba_expand", 2) * c.hidden_size, state, rank, c.get("mamba_d_conv", 4),
            act=c.get("hidden_act", "silu"), bias=c.get("mamba_proj_bias", False),
            conv_bias=c.get("mamba_conv_bias", True),
            norms=(RMSNorm(rank, eps), RMSNorm(state, eps), RMSNorm(state, eps)),
        )  # fmt: skip

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(bias=False, out_bias=False, rope=None) | options)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        experts = c.either("num_experts", "num_local_experts", default=16)
        if experts == 1 or layer % c.get("expert_layer_period", 2) != c.get("expert_layer_offset", 1):
            return super().make_mlp(c, layer)
        choice = Choice(c.get("num_experts_per_tok", 2), "softmax")
        return Mixture(c.hidden_size, experts, c.intermediate_size, c.get(*self.act), choice)

    def make_rope(self, c: Config) -> None:
        return None
