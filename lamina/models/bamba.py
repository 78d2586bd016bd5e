"""Bamba: Mamba-2 layers, some layers of attention with RoPE on half of each head, and an MLP in every layer.

https://huggingface.co/blog/bamba
"""

from __future__ import annotations

import math
from typing import Any

from lamina.checkpoint.names import Either, Value
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import mlp_names, qkv_names
from lamina.models.transformer import Transformer
from lamina.nn import GatedRMSNorm, Mamba2Mixer, Mixer, Rotary, mamba2_names

LAYER = "model.layers.{i}"


def mamba2_mixer(c: Config, eps: float, **options: Any) -> Mamba2Mixer:
    """The mixer of the fields `mamba_…`; `options` replace those of `Mamba2Mixer`."""
    inner, heads = c.get("mamba_expand", 2) * c.hidden_size, c.get("mamba_n_heads", 128)
    head_dim = c.get("mamba_d_head", "auto")
    head_dim = inner // heads if head_dim == "auto" else head_dim
    if heads * head_dim != inner:
        raise InputError(
            f"mamba_n_heads={heads} × mamba_d_head={head_dim} in the configuration must be mamba_expand × hidden_size, "
            f"{inner}"
        )
    bias = c.get("mamba_proj_bias", False)
    defaults: dict[str, Any] = dict(
        act=c.get("hidden_act", "silu"), bias=bias, out_bias=bias, conv_bias=c.get("mamba_conv_bias", True),
        dt_limit=c.get("time_step_limit", (0.0, math.inf)), norm=GatedRMSNorm(inner, eps),
    )  # fmt: skip
    sizes = c.get("mamba_d_state", 256), c.get("mamba_n_groups", 1), c.get("mamba_d_conv", 4)
    return Mamba2Mixer(c.hidden_size, heads, head_dim, *sizes, **defaults | options)


def hybrid_names(layer: str) -> dict[str, Value]:
    """Parameter names of blocks that either attend (`self_attn`) or are recurrent (`mamba`)."""
    return {
        **qkv_names("blocks.{i}.attention", f"{layer}.self_attn"),
        **mamba2_names("blocks.{i}.attention", f"{layer}.mamba"),
        "blocks.{i}.attention.out": Either(f"{layer}.self_attn.o_proj", f"{layer}.mamba.out_proj"),
    }


class Bamba(Transformer):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norm": f"{LAYER}.input_layernorm",
        **hybrid_names(LAYER),
        "blocks.{i}.mlp_norm": f"{LAYER}.pre_ff_layernorm",
        **mlp_names("blocks.{i}.mlp", f"{LAYER}.feed_forward"),
        "norm": "model.final_layernorm",
        "head": "lm_head",
    }
    defaults = {"num_key_value_heads": 8}
    eps = ("rms_norm_eps", 1e-5)

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        if layer in c.get("attn_layer_indices", ()):
            return self.make_attention(c, layer)
        return mamba2_mixer(c, c.get(*self.eps))

    def make_rope(self, c: Config) -> Rotary:
        c.require("attn_rotary_emb", (c.head_width // 2,), c.head_width // 2)  # in published files
        return Rotary.of(c.with_values(partial_rotary_factor=None), c.head_width, self.rope_base, partial=0.5)
