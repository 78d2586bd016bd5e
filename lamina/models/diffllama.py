"""DiffLlama: Llama with differential attention, in which one half of the heads is subtracted from the other.

    (softmax(q₁ k₁ᵀ) - λ softmax(q₂ k₂ᵀ)) [v₁ | v₂], then a norm        λ = exp(a₁ · b₁) - exp(a₂ · b₂) + λ₀

https://arxiv.org/abs/2410.05258
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import Attention, LayerSpecs
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.transformer import Transformer
from lamina.nn import Linear, Positions, RMSNorm, rotate


class DifferentialAttention(nn.Module):
    """Key head j of the first half and its partner in the second half see the same two value heads. So both keys and
    both values are stored as one head of twice the width, and a query is zero where its partner's key is.

    layer   index of the layer, on which λ₀ depends
    """

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.heads, self.head_dim = c.num_attention_heads, c.head_width
        self.kv_heads, bias = c.get("num_key_value_heads", self.heads), c.get("attention_bias", False)
        if self.kv_heads % 2:
            raise InputError(f"num_key_value_heads={self.kv_heads} in the configuration must be even")
        self.specs: LayerSpecs = {"attention": Attention(self.kv_heads // 2, 2 * self.head_dim, 2 * self.head_dim)}
        self.qkv = Linear(c.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.norm = RMSNorm(2 * self.head_dim, c.get("rms_norm_eps", 1e-5), weight=False)
        self.out = Linear(self.heads * self.head_dim, c.hidden_size, bias=bias)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.zeros(self.head_dim)) for _ in range(4))

    def forward(self, x: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        q, k, v = (part.transpose(1, 2) for part in parts)  # [B, heads, T, D] each
        q, k = (rotate(part, shared.ropes["default"]) for part in (q, k))
        pairs = self.kv_heads // 2
        q = q.unflatten(1, (2, pairs, -1)).transpose(1, 2)  # [B, pairs, 2, G, T, D]
        zero = torch.zeros_like(q[:, :, 0])
        wide = torch.stack([torch.cat([q[:, :, 0], zero], dim=-1), torch.cat([zero, q[:, :, 1]], dim=-1)], dim=2)
        k, v = (torch.cat(part.chunk(2, dim=1), dim=-1) for part in (k, v))  # [B, pairs, T, 2D]
        out = memory.attend(wide.flatten(1, 3), k, v, scale=self.head_dim**-0.5)
        first, second = out.unflatten(1, (pairs, 2, -1)).unbind(2)  # [B, pairs, G, T, 2D]
        y = (1 - self.start) * self.norm(first - self.share().to(out.dtype) * second)
        return self.out(y.flatten(1, 2).transpose(1, 2).flatten(2), onto)

    def share(self) -> Tensor:
        """λ"""
        one, two = ((a.float() * b.float()).sum().exp() for a, b in ((self.q1, self.k1), (self.q2, self.k2)))
        return one - two + self.start


class DiffLlama(Transformer):
    names = Transformer.names | {
        f"blocks.{{i}}.attention.{name}": f"model.layers.{{i}}.self_attn.lambda_{name}"
        for name in ("q1", "k1", "q2", "k2")
    }
    eps = ("rms_norm_eps", 1e-5)

    def __init__(self, c: Config) -> None:
        c.ignore("lambda_std_dev")  # of initial weights
        super().__init__(c)

    def make_attention(self, c: Config, layer: int, **options: Any) -> Any:
        return DifferentialAttention(c, layer)
