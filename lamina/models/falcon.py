"""Falcon: attention and MLP side by side (or not), one key head or a few, RoPE or ALiBi.

https://arxiv.org/abs/2311.16867
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.checkpoint.names import Either, From
from lamina.config import Config
from lamina.models.gpt import Gpt, split_groups
from lamina.nn import AlibiBias, Block, ParallelBlock, SelfAttention, alibi_slopes

LAYER = "transformer.h.{i}"


class Falcon(Gpt):
    names = {
        "embedding": "transformer.word_embeddings",
        "blocks.{i}.attention_norm": Either(f"{LAYER}.input_layernorm", f"{LAYER}.ln_attn"),
        "blocks.{i}.attention.out": f"{LAYER}.self_attention.dense",
        "blocks.{i}.mlp_norm": Either(f"{LAYER}.post_attention_layernorm", f"{LAYER}.ln_mlp"),
        "blocks.{i}.mlp.up": f"{LAYER}.mlp.dense_h_to_4h",
        "blocks.{i}.mlp.down": f"{LAYER}.mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    ignored = (f"{LAYER}.self_attention.rotary_emb.inv_freq",)
    aliases = {
        "hidden_size": "n_embed",
        "intermediate_size": "ffn_hidden_size",
        "attention_bias": "bias",
        "mlp_bias": "bias",
    }
    defaults = {"attention_bias": False, "mlp_bias": False, "max_position_embeddings": 2048}
    act = ("activation", "gelu")

    def __init__(self, c: Config) -> None:
        c.require("apply_residual_connection_post_layernorm", (False,), False)  # in published files
        c.ignore("ff_factor")  # `ffn_hidden_size` in another unit
        heads = c.num_attention_heads
        if c.get("new_decoder_architecture", False):
            c.require("parallel_attn", (True,), True)
            c.ignore("multi_query")
            kv_heads = c.get("num_kv_heads", heads)
        else:
            c.require("num_ln_in_parallel_attn", (None, 1))
            c.ignore("num_kv_heads")
            kv_heads = 1 if c.get("multi_query", True) else heads
        super().__init__(c.with_values(num_key_value_heads=kv_heads))
        qkv = From(f"{LAYER}.self_attention.query_key_value", split_groups(kv_heads, c.head_width))
        self.names = self.names | {"blocks.{i}.attention.qkv": qkv}
        self.alibi: AlibiBias | None = None
        if c.get("alibi", False):  # which is added before scores are scaled
            c.ignore("rope_parameters", "rope_parameters.*", "rope_theta", "rope_scaling")
            self.alibi = AlibiBias(alibi_slopes(heads, scale=c.head_width**-0.5))

    def make_block(self, c: Config, layer: int) -> nn.Module:
        attention, mlp = self.make_attention(c, layer), self.make_mlp(c, layer)
        if not c.get("parallel_attn", True):
            return Block(attention, mlp, attention_norm=self.make_norm(c), mlp_norm=self.make_norm(c))
        new = c.get("new_decoder_architecture", False)
        two = new and c.require("num_ln_in_parallel_attn", (1, 2), 2) == 2
        return ParallelBlock(
            attention, mlp, attention_norm=self.make_norm(c), mlp_norm=self.make_norm(c) if two else None
        )

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        rope = None if c.get("alibi", False) else "default"
        return super().make_attention(c, layer, **dict(rope=rope) | options)

    def make_rope(self, c: Config) -> Any:
        return None if c.get("alibi", False) else super().make_rope(c)

    def prepare(self, positions: Tensor) -> Any:
        return super().prepare(positions)._replace(bias=self.alibi)
