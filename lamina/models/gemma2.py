"""Gemma 2: sliding-window and full attention in turn; attention scores and logits are soft-capped.

    x + norm(attention(norm(x)))        x + norm(mlp(norm(x)))

https://arxiv.org/abs/2408.00118
"""

from __future__ import annotations

from torch import Tensor, nn

from lamina.attention.window import Full, Sliding
from lamina.cache.memory import Memory
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import Decoder, mlp_names, qkv_names
from lamina.nn import GatedMLP, RMSNorm, Rotary, SelfAttention, rope_parameters
from lamina.nn.attention.rotary import RopeTable


class Block(nn.Module):
    def __init__(self, c: Config, kind: str) -> None:
        super().__init__()
        bias = c.get("attention_bias", False)
        self.attention = SelfAttention(
            c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.get("head_dim", 256),
            bias=bias, out_bias=bias, window=Sliding(c.sliding_window) if kind == "sliding_attention" else Full(),
            scale=c.get("query_pre_attn_scalar", 256) ** -0.5, softcap=c.said("attn_logit_softcapping", 50.0),
        )  # fmt: skip
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.get("hidden_activation", "gelu_pytorch_tanh"))
        self.before_attention, self.after_attention = norm(c), norm(c)
        self.before_mlp, self.after_mlp = norm(c), norm(c)
        self.specs = {"attention": self.attention.spec}

    def forward(self, x: Tensor, memory: Memory, rope: RopeTable) -> Tensor:
        y = self.attention(self.before_attention(x), memory, rope)
        x = self.after_attention(y, onto=x)
        y = self.mlp(self.before_mlp(x))
        return self.after_mlp(y, onto=x)


def norm(c: Config) -> RMSNorm:
    return RMSNorm(c.hidden_size, c.get("rms_norm_eps", 1e-6), plus_one=True)


def layer_kinds(c: Config) -> list[str]:
    """The kind of each layer: as listed, or in turn where nothing is listed."""
    kinds = ("sliding_attention", "full_attention")
    found = c.get("layer_types") or [kinds[i % 2] for i in range(c.num_hidden_layers)]
    if len(found) != c.num_hidden_layers or not set(found) <= set(kinds):
        raise InputError(f"layer_types must name {c.num_hidden_layers} layers, each one of {kinds}, not {found}")
    return found


class Gemma2(Decoder):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.before_attention": "model.layers.{i}.input_layernorm",
        **qkv_names("blocks.{i}.attention", "model.layers.{i}.self_attn"),
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
        "blocks.{i}.after_attention": "model.layers.{i}.post_attention_layernorm",
        "blocks.{i}.before_mlp": "model.layers.{i}.pre_feedforward_layernorm",
        **mlp_names("blocks.{i}.mlp", "model.layers.{i}.mlp"),
        "blocks.{i}.after_mlp": "model.layers.{i}.post_feedforward_layernorm",
        "norm": "model.norm",
        "head": "lm_head",
    }

    def __init__(self, c: Config) -> None:
        c.require("use_bidirectional_attention", (False,), False)
        super().__init__(
            c,
            (Block(c, kind) for kind in layer_kinds(c)),
            norm(c),
            rope=Rotary(c.get("head_dim", 256), rope_parameters(c), c.get("max_position_embeddings")),
            tied=c.get("tie_word_embeddings", True),
        )
        self.softcap = c.said("final_logit_softcapping", 30.0)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.embedding.embedding_dim**0.5, rounded=True)  # rounded as it was in training

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), softcap=self.softcap)
