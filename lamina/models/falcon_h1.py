"""Falcon-H1: attention and Mamba-2 in parallel, x + attention(norm(x)) + mamba(norm(x)), then x + mlp(norm(x)).

Fixed multipliers (maximal update parametrization) are applied at the embedding, around both mixers, in the MLP and at
the head.

https://arxiv.org/abs/2507.22448
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import Decoder, mlp_names, qkv_names
from lamina.nn import GatedMLP, GatedRMSNorm, Mamba2Mixer, Positions, RMSNorm, Rotary, SelfAttention, mamba2_names


class Block(nn.Module):
    def __init__(self, c: Config, head_dim: int) -> None:
        super().__init__()
        bias, act = c.get("attention_bias", False), c.get("hidden_act", "silu")
        self.mixer_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = SelfAttention(
            c.hidden_size, c.num_attention_heads, c.get("num_key_value_heads", c.num_attention_heads), head_dim,
            bias=bias, out_bias=bias,
            scale=c.get("key_multiplier", 1.0) * head_dim**-0.5,  # a factor on keys equals one on scores
            factors=(c.get("attention_in_multiplier", 1.0), c.get("attention_out_multiplier", 1.0)),
        )  # fmt: skip
        self.mamba = mamba(c)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(
            c.hidden_size, c.intermediate_size, act, c.get("mlp_bias", False),
            factors=c.get("mlp_multipliers", (1.0, 1.0)),
        )  # fmt: skip
        self.specs = {"attention": self.attention.spec, **self.mamba.specs}

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        y = self.mixer_norm(x)
        x = self.mamba(y, memory, onto=self.attention(y, memory, shared, onto=x))
        return self.mlp(self.mlp_norm(x), onto=x)


def mamba(c: Config) -> Mamba2Mixer:
    heads, groups = c.mamba_n_heads, c.get("mamba_n_groups", 1)
    inner = c.get("mamba_d_ssm", c.get("mamba_expand", 2) * c.hidden_size)
    head_dim = c.get("mamba_d_head", "auto")
    head_dim = inner // heads if head_dim == "auto" else head_dim
    if heads * head_dim != inner:
        raise InputError(
            f"mamba_n_heads {heads} × mamba_d_head {head_dim} in the configuration is {heads * head_dim}, "
            f"but the mixer is {inner} wide"
        )
    norm = None
    if c.get("mamba_rms_norm", False):
        gate_first = not c.get("mamba_norm_before_gate", True)
        norm = GatedRMSNorm(inner, c.rms_norm_eps, groups=groups, gate_first=gate_first)
    return Mamba2Mixer(
        c.hidden_size, heads, head_dim, c.mamba_d_state, groups, c.get("mamba_d_conv", 4),
        act=c.get("hidden_act", "silu"), bias=c.get("mamba_proj_bias", False), conv_bias=c.get("mamba_conv_bias", True),
        out_bias=c.get("projectors_bias", False), dt_limit=c.get("time_step_limit", (0.0, math.inf)), norm=norm,
        scales=c.get("ssm_multipliers", (1.0,) * 5),
        factors=(c.get("ssm_in_multiplier", 1.0), c.get("ssm_out_multiplier", 1.0)),
    )  # fmt: skip


class FalconH1(Decoder):
    no_effect = ("mamba_norm_before_gate", "mlp_expansion_factor", "time_step_min")
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.mixer_norm": "model.layers.{i}.input_layernorm",
        **qkv_names("blocks.{i}.attention", "model.layers.{i}.self_attn"),
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
        **mamba2_names("blocks.{i}.mamba", "model.layers.{i}.mamba"),
        "blocks.{i}.mlp_norm": "model.layers.{i}.pre_ff_layernorm",
        **mlp_names("blocks.{i}.mlp", "model.layers.{i}.feed_forward"),
        "norm": "model.final_layernorm",
        "head": "lm_head",
    }
    ignored = ("model.layers.{i}.mamba.mup_vector",)

    def __init__(self, c: Config) -> None:
        c.require("attn_layer_indices", (None,))  # in published files; transformers reads neither
        c.require("mamba_use_mlp", (True,), True)
        head_dim = c.head_width
        super().__init__(
            c,
            (Block(c, head_dim) for _ in range(c.num_hidden_layers)),
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            rope=Rotary.of(c, head_dim),
            tied=c.get("tie_word_embeddings", False),
        )
        self.embedding_factor, self.head_factor = c.get("embedding_multiplier", 1.0), c.get("lm_head_multiplier", 1.0)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.embedding_factor)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), scale=self.head_factor)
