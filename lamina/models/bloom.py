"""BLOOM: a decoder with ALiBi instead of position embeddings, biases everywhere, and a norm of the embeddings.

https://arxiv.org/abs/2211.05100
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.checkpoint.names import From
from lamina.config import Config
from lamina.models.gpt import Gpt, split_groups
from lamina.nn import AlibiBias, Block, Positions, SelfAttention, alibi_slopes

LAYER = "transformer.h.{i}"


class Bloom(Gpt):
    names = {
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "blocks.{i}.attention_norm": f"{LAYER}.input_layernorm",
        "blocks.{i}.attention.out": f"{LAYER}.self_attention.dense",
        "blocks.{i}.mlp_norm": f"{LAYER}.post_attention_layernorm",
        "blocks.{i}.mlp.up": f"{LAYER}.mlp.dense_h_to_4h",
        "blocks.{i}.mlp.down": f"{LAYER}.mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    aliases = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}

    def __init__(self, c: Config) -> None:
        if c.get("pretraining_tp", 1) > 1:
            c.require("slow_but_exact", (False,), False)
        c.ignore("slow_but_exact", "n_inner", "seq_length", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv")
        c.ignore("bias_dropout_fusion", "masked_softmax_fusion", "attention_softmax_in_fp32", "unk_token_id")
        c.require("activation_function", ("gelu_new",), "gelu_new")
        super().__init__(c)
        self.embedding_norm = self.make_norm(c)
        self.alibi = AlibiBias(alibi_slopes(c.num_attention_heads))
        qkv = From(f"{LAYER}.self_attention.query_key_value", split_groups(c.num_attention_heads, c.head_width))
        self.names = {**self.names, "blocks.{i}.attention.qkv": qkv}

    def make_block(self, c: Config, layer: int) -> nn.Module:
        kind = NormedResidualBlock if c.get("apply_residual_connection_post_layernorm", False) else Block
        attention, mlp = self.make_attention(c, layer), self.make_mlp(c, layer)
        return kind(attention, mlp, attention_norm=self.make_norm(c), mlp_norm=self.make_norm(c))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(rope=None) | options)

    def make_rope(self, c: Config) -> None:
        return None

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding_norm(super().embed(ids))

    def prepare(self, positions: Tensor) -> Any:
        return Positions(bias=self.alibi)


class NormedResidualBlock(Block):
    """norm(x) + attention(norm(x)), then the same with the MLP."""

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        assert self.attention_norm is not None and self.mlp_norm is not None
        x = self.attention_norm(x)
        x = self.mlp_norm(self.attention(x, memory, shared, onto=x))
        return self.mlp(x, onto=x)
