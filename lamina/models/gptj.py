"""GPT-J and CodeGen: attention and MLP side by side; RoPE on the first `rotary_dim` dimensions, paired as neighbours.

https://github.com/kingoflolz/mesh-transformer-jax  https://arxiv.org/abs/2203.13474
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lamina.checkpoint.names import From, Value
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.gpt import Gpt
from lamina.nn import Rotary, SelfAttention

BLOCK = "transformer.h.{i}"
NAMES: dict[str, Value] = {
    "embedding": "transformer.wte",
    "blocks.{i}.attention_norm": f"{BLOCK}.ln_1",
    "blocks.{i}.attention.out": f"{BLOCK}.attn.out_proj",
    "blocks.{i}.mlp.up": f"{BLOCK}.mlp.fc_in",
    "blocks.{i}.mlp.down": f"{BLOCK}.mlp.fc_out",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


class GPTJ(Gpt):
    names = NAMES | {"blocks.{i}.attention.qkv": tuple(f"{BLOCK}.attn.{part}_proj" for part in "qkv")}
    ignored = (f"{BLOCK}.attn.bias", f"{BLOCK}.attn.masked_bias", f"{BLOCK}.attn.causal_mask")
    aliases = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    }
    order = "parallel"
    tied = False
    head_bias = True

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        c.ignore("n_ctx", "rotary", "scale_attn_weights")  # in published files; transformers reads none of them
        return super().make_attention(c, layer, **dict(bias=False, out_bias=False, neighbours=True) | options)

    def make_rope(self, c: Config) -> Rotary:
        dim = c.said("rotary_dim", 64)
        if dim is None or not 0 < dim <= c.head_width:
            raise InputError(f"rotary_dim={dim} in the configuration must be from 2 to the head width, {c.head_width}")
        return Rotary(dim, {"rope_type": "default", "rope_theta": 10_000.0})


class CodeGen(GPTJ):
    names = NAMES | {"blocks.{i}.attention.qkv": From(f"{BLOCK}.attn.qkv_proj", lambda t: four_shards(t))}


def four_shards(t: Tensor) -> Tensor:
    """q, k and v of CodeGen: stored in four shards, each with its heads' q, v and k. [3 · width, width] -> q, k, v"""
    q, v, k = t.unflatten(0, (4, 3, -1)).unbind(1)  # [4, width / 4, width] each
    return torch.cat([q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)])
