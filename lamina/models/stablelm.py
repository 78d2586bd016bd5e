"""StableLM: Llama with LayerNorm, RoPE on a quarter of each head, and in some a norm of each query and key head.

https://arxiv.org/abs/2402.17834
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina.checkpoint.names import Stack
from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import LayerNorm, Norm, ParallelBlock, SelfAttention


class StableLm(Transformer):
    names = Transformer.names | {
        f"blocks.{{i}}.attention.{part}_norm.scales": Stack(
            f"model.layers.{{i}}.self_attn.{part}_layernorm.norms.{{e}}.weight"
        )
        for part in "qk"
    }
    defaults = {"num_key_value_heads": 32}
    no_effect = ("norm_eps", "num_heads", "rope_pct", "rotary_scaling_factor")  # older names, beside the newer
    eps = ("layer_norm_eps", 1e-5)
    rope_partial = 0.25

    def make_norm(self, c: Config) -> Norm:
        return LayerNorm(c.hidden_size, c.get(*self.eps))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        heads, dim, eps = c.num_attention_heads, c.head_width, c.get(*self.eps)
        own: dict[str, Any] = dict(bias=c.get("use_qkv_bias", False), out_bias=False)
        if c.get("qk_layernorm", False):
            kv_heads = c.get("num_key_value_heads", heads)
            own |= dict(q_norm=NormPerHead(heads, dim, eps), k_norm=NormPerHead(kv_heads, dim, eps))
        return super().make_attention(c, layer, **own | options)

    def make_block(self, c: Config, layer: int) -> nn.Module:
        if not c.get("use_parallel_residual", False):
            return super().make_block(c, layer)
        attention, mlp = self.make_attention(c, layer), self.make_mlp(c, layer)
        return ParallelBlock(attention, mlp, attention_norm=self.make_norm(c))


class NormPerHead(LayerNorm):
    """A layer norm of each head with factors of its own, [..., heads, dim] -> [..., heads, dim]."""

    def __init__(self, heads: int, dim: int, eps: float) -> None:
        super().__init__(dim, eps, weight=False, bias=False)
        self.scales = nn.Parameter(torch.ones(heads, dim))

    def forward(self, x: Tensor, dtype: torch.dtype | None = None, onto: Tensor | None = None) -> Tensor:
        return super().forward(x, dtype, onto) * self.scales
