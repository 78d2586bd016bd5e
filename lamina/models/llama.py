"""Llama: x + attention(norm(x)), then x + mlp(norm(x)); rotary positions, grouped heads, gated MLP.

https://arxiv.org/abs/2302.13971
"""

from __future__ import annotations

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.config import Config
from lamina.model import Model
from lamina.nn import GatedMLP, RMSNorm, Rotary, SelfAttention, rope_parameters
from lamina.nn.rotary import Table


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

    def forward(self, x: Tensor, memory: Memory, rope: Table) -> Tensor:
        x = x + self.attention(self.attention_norm(x), memory, rope)
        return x + self.mlp(self.mlp_norm(x))


class Llama(Model):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        "blocks.{i}.attention.qkv": (
            "model.layers.{i}.self_attn.q_proj",
            "model.layers.{i}.self_attn.k_proj",
            "model.layers.{i}.self_attn.v_proj",
        ),
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
        "blocks.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        "blocks.{i}.mlp.gate_up": ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
        "blocks.{i}.mlp.down": "model.layers.{i}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    }
    ignored = ("model.layers.{i}.self_attn.rotary_emb.inv_freq",)

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.vocab = c.vocab_size
        head_dim = c.get("head_dim", c.hidden_size // c.num_attention_heads)
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.rope = Rotary(head_dim, rope_parameters(c), c.get("max_position_embeddings"))
        self.blocks = nn.ModuleList(Block(c, head_dim) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.get("tie_word_embeddings", False):
            self.head.weight = self.embedding.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def prepare(self, positions: Tensor) -> Table:
        return self.rope(positions)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))
