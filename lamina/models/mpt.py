"""MPT: a decoder with ALiBi instead of position embeddings, LayerNorm, and no biases.

https://www.databricks.com/blog/mpt-7b
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lamina.config import Config
from lamina.models.gpt import Gpt
from lamina.nn import AlibiBias, LayerNorm, Norm, Positions, SelfAttention, alibi_slopes

BLOCK = "transformer.blocks.{i}"


class MPT(Gpt):
    names = {
        "embedding": "transformer.wte",
        "blocks.{i}.attention_norm": f"{BLOCK}.norm_1",
        "blocks.{i}.attention.qkv": f"{BLOCK}.attn.Wqkv",
        "blocks.{i}.attention.out": f"{BLOCK}.attn.out_proj",
        "blocks.{i}.mlp_norm": f"{BLOCK}.norm_2",
        "blocks.{i}.mlp.up": f"{BLOCK}.ffn.up_proj",
        "blocks.{i}.mlp.down": f"{BLOCK}.ffn.down_proj",
        "norm": "transformer.norm_f",
        "head": "lm_head",
    }
    aliases = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}

    def __init__(self, c: Config) -> None:
        c.require("no_bias", (True,), True)
        c.require("logit_scale", (None,))
        c.require("expansion_ratio", (4,), 4)
        c.require("norm_type", ("low_precision_layernorm", "layernorm"), "low_precision_layernorm")
        c.ignore("learned_pos_emb", "embedding_fraction", "init_config", "init_config.*")  # ALiBi replaces; of training
        a = attention_config(c)
        a.require("attn_type", ("multihead_attention",), "multihead_attention")
        a.require("alibi", (True,), True)
        for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
            a.require(name, (False,), False)
        a.ignore("attn_impl", "model_type")
        super().__init__(c.with_values(attention_bias=False, mlp_bias=False, activation_function="gelu"))
        self.alibi = AlibiBias(alibi_slopes(c.num_attention_heads, largest=a.get("alibi_bias_max", 8)))

    def make_norm(self, c: Config) -> Norm:
        return LayerNorm(c.hidden_size, c.get(*self.eps), bias=False)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        a = attention_config(c)
        own = dict(rope=None, scale=a.get("softmax_scale"), clip=a.get("clip_qkv") or None)
        return super().make_attention(c, layer, **own | options)

    def make_rope(self, c: Config) -> None:
        return None

    def prepare(self, positions: Tensor) -> Any:
        return Positions(bias=self.alibi)


def attention_config(c: Config) -> Config:
    return Config({}) if c.get("attn_config") is None else c.part("attn_config")
