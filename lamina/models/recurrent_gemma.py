"""RecurrentGemma (Griffin): two layers of RG-LRU for each layer of sliding-window attention; logits are soft-capped.

https://arxiv.org/abs/2404.07839
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina.attention.window import Sliding, Window
from lamina.checkpoint.names import Either
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import mlp_names, qkv_names
from lamina.models.transformer import Transformer
from lamina.nn import GatedMLP, Mixer, RGLRUMixer, RMSNorm, SelfAttention, rg_lru_names

LAYER = "model.layers.{i}"


class RecurrentGemma(Transformer):
    names = {
        "embedding": "model.embed_tokens",
        "blocks.{i}.attention_norm": f"{LAYER}.temporal_pre_norm",
        **qkv_names("blocks.{i}.attention", f"{LAYER}.temporal_block"),
        **rg_lru_names("blocks.{i}.attention", f"{LAYER}.temporal_block"),
        "blocks.{i}.attention.out": Either(f"{LAYER}.temporal_block.o_proj", f"{LAYER}.temporal_block.linear_out"),
        "blocks.{i}.mlp_norm": f"{LAYER}.channel_pre_norm",
        **mlp_names("blocks.{i}.mlp", f"{LAYER}.mlp_block"),
        "norm": "model.final_norm",
        "head": "lm_head",
    }
    tied = True
    act = ("hidden_activation", "gelu_pytorch_tanh")
    rope_partial = 0.5

    def __init__(self, c: Config) -> None:
        c.require("embeddings_scale_by_sqrt_dim", (True,), True)
        super().__init__(c)
        self.softcap = c.get("logits_soft_cap", 30.0)
        # Rounded as it was in training, in a model of any dtype.
        self.embedding_factor = float(torch.tensor(c.hidden_size**0.5, dtype=torch.bfloat16, device="cpu"))

    def make_norm(self, c: Config) -> RMSNorm:
        return RMSNorm(c.hidden_size, c.get(*self.eps), plus_one=True)

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        kinds = c.first("block_types", "_block_types", default=("recurrent", "recurrent", "attention"))
        if not kinds or not set(kinds) <= {"recurrent", "attention"}:
            raise InputError(f"block_types={kinds} in the configuration must be a list of recurrent and attention")
        if kinds[layer % len(kinds)] == "attention":
            return self.make_attention(c, layer)
        inner, heads = c.get("lru_width", c.hidden_size), c.num_attention_heads
        if inner % heads:
            raise InputError(f"num_attention_heads={heads} in the configuration does not divide lru_width={inner}")
        return RGLRUMixer(c.hidden_size, inner, heads, c.get("conv1d_width", 4), act=c.get(*self.act))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(out_bias=True) | options)

    def make_window(self, c: Config, layer: int) -> Window:
        return Sliding(c.first("attention_window_size", "sliding_window", default=2048))

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        """Half as wide as `intermediate_size`, which counts both gate and up."""
        return GatedMLP(c.hidden_size, c.intermediate_size // 2, c.get(*self.act), True)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.embedding_factor)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), softcap=self.softcap)
