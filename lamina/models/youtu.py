"""Youtu-LLM and MiniCPM3: Llama with the multi-head latent attention of DeepSeek V2; MiniCPM3 scales its parts (µP).

https://arxiv.org/abs/2512.24618  https://arxiv.org/abs/2404.06395
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.config import Config
from lamina.models.deepseek import latent_names
from lamina.models.transformer import Transformer
from lamina.nn import Block, GatedMLP, LatentAttention, Mixer, Positions, Rotary


class Youtu(Transformer):
    names = Transformer.names | latent_names("blocks.{i}.attention", "model.layers.{i}.self_attn")
    defaults = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    tied = True

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        return LatentAttention(c)

    def make_rope(self, c: Config) -> Rotary:
        c.ignore("qk_head_dim", "num_key_value_heads")  # follow from others
        c.require("head_dim", (c.qk_rope_head_dim,), c.qk_rope_head_dim)  # by which transformers rotates
        return Rotary.of(c, c.qk_rope_head_dim)


class MiniCPM3(Youtu):
    defaults = dict(
        kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64, qk_rope_head_dim=32, scale_depth=1.4,
        dim_model_base=256,
    )  # fmt: skip
    eps = ("rms_norm_eps", 1e-5)

    def __init__(self, c: Config) -> None:
        value_dim = c.get("v_head_dim", c.hidden_size // c.num_attention_heads)
        super().__init__(c.with_values(v_head_dim=value_dim, rope_interleave=False))
        self.embed_factor = c.get("scale_emb", 12)
        self.head_factor = c.get("dim_model_base", c.hidden_size) / c.hidden_size

    def make_block(self, c: Config, layer: int) -> nn.Module:
        layers = c.num_hidden_layers
        factor = c.get("scale_depth", layers**0.5) / layers**0.5
        mlp = GatedMLP(
            c.hidden_size, c.intermediate_size, c.get(*self.act), c.get("mlp_bias", False), factors=(1.0, factor)
        )
        norms = (self.make_norm(c) for _ in range(2))
        return ScaledBlock(LatentAttention(c), mlp, factor, attention_norm=next(norms), mlp_norm=next(norms))

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids, self.embed_factor, rounded=True)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), before=self.head_factor)


class ScaledBlock(Block):
    """x + factor · attention(norm(x)); the MLP multiplies its result itself."""

    def __init__(self, attention: LatentAttention, mlp: nn.Module, factor: float, **norms: Any) -> None:
        super().__init__(attention, mlp, **norms)
        self.factor = factor

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        assert self.attention_norm is not None and self.mlp_norm is not None
        x = x + self.attention(self.attention_norm(x), memory, shared) * self.factor
        return self.mlp(self.mlp_norm(x), onto=x)
