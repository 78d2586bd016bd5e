"""Llama: x + attention(norm(x)), then x + mlp(norm(x)); rotary positions, grouped heads, gated MLP.

https://arxiv.org/abs/2302.13971
"""

from __future__ import annotations

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.config import Config
from lamina.models.decoder import Decoder, mlp_names, qkv_names
from lamina.nn import GatedMLP, RMSNorm, Rotary, SelfAttention, rope_parameters
from lamina.nn.attention.rotary import RopeTable


class Block(nn.Module):
    def __init__(self, c: Config, head_dim: int) -> None:
        super().__init__()
        bias = c.get("attention_bias", False)
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = SelfAttention(
            c.hidden_size, c.num_attention_heads, c.get("num_key_value_heads", c.num_attention_heads), head_dim,
            bias=bias, out_bias=bias,
        )  # fmt: skip
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.get("hidden_act", "silu"), c.get("mlp_bias", False))
        self.specs = {"attention": self.attention.spec}

    def forward(self, x: Tensor, memory: Memory, rope: RopeTable) -> Tensor:
        x = self.attention(self.attention_norm(x), memory, rope, onto=x)
        return self.mlp(self.mlp_norm(x), onto=x)


class Llama(Decoder):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        **qkv_names("blocks.{i}.attention", "model.layers.{i}.self_attn"),
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
        "blocks.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        **mlp_names("blocks.{i}.mlp", "model.layers.{i}.mlp"),
        "norm": "model.norm",
        "head": "lm_head",
    }
    ignored = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)

    def __init__(self, c: Config) -> None:
        head_dim = c.head_width
        super().__init__(
            c,
            (Block(c, head_dim) for _ in range(c.num_hidden_layers)),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            rope=Rotary(head_dim, rope_parameters(c), c.get("max_position_embeddings")),
            tied=c.get("tie_word_embeddings", False),
        )
