"""GPT-NeoX (Pythia): attention and MLP side by side, each after a norm of its own; RoPE on part of a head.

https://arxiv.org/abs/2204.06745
"""

from __future__ import annotations

from lamina.checkpoint.names import Either, From
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.gpt import Gpt, split_groups
from lamina.nn import Block, ParallelBlock

LAYER = "gpt_neox.layers.{i}"


class GPTNeoX(Gpt):
    names = {
        "embedding": "gpt_neox.embed_in",
        "blocks.{i}.attention_norm": f"{LAYER}.input_layernorm",
        "blocks.{i}.attention.out": f"{LAYER}.attention.dense",
        "blocks.{i}.mlp_norm": f"{LAYER}.post_attention_layernorm",
        "blocks.{i}.mlp.up": f"{LAYER}.mlp.dense_h_to_4h",
        "blocks.{i}.mlp.down": f"{LAYER}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": Either("lm_head", "embed_out"),
    }
    ignored = tuple(f"{LAYER}.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq"))
    aliases = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    tied = False
    eps = ("layer_norm_eps", 1e-5)
    act = ("hidden_act", "gelu")
    rope_partial = 0.25
    defaults = {"intermediate_size": 24_576}

    @classmethod
    def complete(cls, config: Config) -> Config:
        for name, own in cls.aliases.items():
            if config.values.get(name) is not None and own not in config.values:
                raise InputError(f"{name}={config.values[name]!r} in the configuration is called {own} in this family")
        return super().complete(config)

    def __init__(self, c: Config) -> None:
        c.require("head_dim", (c.hidden_size // c.num_attention_heads, None))  # which transformers reads for RoPE alone
        super().__init__(c)
        c.ignore("is_decoder")
        qkv = From(f"{LAYER}.attention.query_key_value", split_groups(c.num_attention_heads, c.head_width))
        self.names = self.names | {"blocks.{i}.attention.qkv": qkv}

    def make_block(self, c: Config, layer: int) -> Block | ParallelBlock:
        kind = ParallelBlock if c.get("use_parallel_residual", True) else Block
        attention, mlp = self.make_attention(c, layer), self.make_mlp(c, layer)
        return kind(attention, mlp, attention_norm=self.make_norm(c), mlp_norm=self.make_norm(c))
