"""Hunyuan V1, dense and with experts: Llama with norms of queries and keys after RoPE, whose base may be scaled.

https://github.com/Tencent-Hunyuan/Hunyuan-7B
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lamina.config import Config
from lamina.models.decoder import mlp_names
from lamina.models.transformer import Transformer
from lamina.nn import Choice, Mixture, RMSNorm, Rotary, SelfAttention, rope_parameters
from lamina.nn.moe.names import expert_names


class HunYuanDenseV1(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention.q_norm": "model.layers.{i}.self_attn.query_layernorm",
        "blocks.{i}.attention.k_norm": "model.layers.{i}.self_attn.key_layernorm",
    }
    eps = ("rms_norm_eps", 1e-5)

    def __init__(self, c: Config) -> None:
        c.require("use_qk_norm", (True,), True)  # in published files; transformers reads neither
        c.require("use_cla", (False,), False)
        super().__init__(c.with_values(mlp_bias=False))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        q_norm, k_norm = (RMSNorm(c.head_width, c.get(*self.eps)) for _ in range(2))
        return super().make_attention(c, layer, **dict(q_norm=q_norm, k_norm=k_norm, norms_last=True) | options)

    def make_rope(self, c: Config) -> Rotary:
        settings, dim = rope_parameters(c, self.rope_base), c.head_width
        if settings["rope_type"] == "dynamic" and settings.get("alpha"):  # a fixed base, whatever the length
            settings |= {
                "rope_type": "default",
                "rope_theta": settings["rope_theta"] * settings["alpha"] ** (dim / (dim - 2)),
            }
        return Rotary(dim, settings, c.get("max_position_embeddings"))


class HunYuanMoEV1(HunYuanDenseV1):
    """Every layer has experts beside an MLP that all tokens use. Counts may be given for each layer."""

    names = HunYuanDenseV1.names | {
        "blocks.{i}.mlp.router": "model.layers.{i}.mlp.gate.wg",
        **expert_names("blocks.{i}.mlp.experts", "model.layers.{i}.mlp.experts"),
        **mlp_names("blocks.{i}.mlp.shared", "model.layers.{i}.mlp.shared_mlp"),
    }

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        experts, each = (
            count if isinstance(count, int) else count[layer]
            for count in (c.get("num_experts", 1), c.first("moe_topk", "num_experts_per_tok", default=1))
        )
        width, inner = c.hidden_size, c.intermediate_size
        choice = Choice(each, normed=True)
        return Mixture(width, experts, inner, c.get(*self.act), choice, shared=inner, exact=True)
