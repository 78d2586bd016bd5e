"""Hunyuan V1, dense and with experts: Llama with norms of queries and keys after RoPE, whose base may be scaled.

https://github.com/Tencent-Hunyuan/Hunyuan-7B
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import mlp_names
from lamina.models.transformer import Transformer
from lamina.nn import Choice, Mixture, RMSNorm, Rotary, SelfAttention, rope_parameters
from lamina.nn.moe.names import expert_names

FIXED = {
    "use_qk_norm": True, "use_rotary_pos_emb": True, "use_mixed_mlp_moe": True, "norm_topk_prob": True,
    "use_cla": False, "use_mla": False, "position_embedding_xdrope": False, "group_limited_greedy": False,
    "moe_layer_num_skipped": 0, "norm_type": "rms",
}  # fmt: skip
UNUSED = (
    # settings of what `FIXED` switches off, other names of fields, image tokens, training
    "cla_share_factor", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group",
    "topk_group", "routed_scaling_factor", "attention_head_dim", "mlp_bias", "org_vocab_size",
    "num_media_embeds", "anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views",
    "skip_cls_token", "dense_list", "class_num", "pool_type",
    "add_classification_head", "capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token",
    # of YaRN, beside rope_type="dynamic"
    *(f"{where}.{name}" for where in ("rope_scaling", "rope_parameters")
      for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
)  # fmt: skip


class HunYuanDenseV1(Transformer):
    no_effect = UNUSED
    names = Transformer.names | {
        "blocks.{i}.attention.q_norm": "model.layers.{i}.self_attn.query_layernorm",
        "blocks.{i}.attention.k_norm": "model.layers.{i}.self_attn.key_layernorm",
    }
    eps = ("rms_norm_eps", 1e-5)

    def __init__(self, c: Config) -> None:
        for name, value in FIXED.items():  # in published files; transformers reads none of them
            c.require(name, (value,), value)
        super().__init__(c.with_values(mlp_bias=False))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        q_norm, k_norm = (RMSNorm(c.head_width, c.get(*self.eps)) for _ in range(2))
        return super().make_attention(c, layer, **dict(q_norm=q_norm, k_norm=k_norm, norms_last=True) | options)

    def make_rope(self, c: Config) -> Rotary:
        settings, dim = rope_parameters(c, self.rope_base, more=("alpha",)), c.head_width
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
            for count in (
                c.first("num_experts", "num_local_experts", default=1),
                c.first("moe_topk", "num_experts_per_tok", default=1),
            )
        )
        width, inner = c.hidden_size, c.intermediate_size
        for name, value in (("moe_intermediate_size", inner), ("num_shared_expert", 1)):
            c.ignore(name)
            given = c.values.get(name, value)
            if any(one != value for one in (given if isinstance(given, list) else [given])):
                raise InputError(f"{name}={given} in the configuration is not supported; known: {value}")
        choice = Choice(each, normed=True)
        return Mixture(width, experts, inner, c.get(*self.act), choice, shared=inner, exact=True)
