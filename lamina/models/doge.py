"""Doge: each key has a bias of its own, computed from its value, and residuals have learned factors.

    score = scale · q · k + exp(A · softplus(dt(v)))

The bias is one more dimension of the key. Rows end at `keep_window_size`, past which keys of small bias are dropped.

https://huggingface.co/SmallDoge
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.attention.window import Full, Sliding, Window
from lamina.cache.memory import Memory
from lamina.cache.spec import Attention, LayerSpecs
from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import Block, Linear, Norm, Positions, RMSNorm

MORE = 8  # dimensions added to a key, so that its bytes stay aligned; all but the first are zero


class Doge(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention.A": "model.layers.{i}.self_attn.A",
        "blocks.{i}.attention.dt": "model.layers.{i}.self_attn.dt_proj",
        "blocks.{i}.attention_residual": "model.layers.{i}.input_residual",
        "blocks.{i}.mlp_residual": "model.layers.{i}.post_attention_residual",
    }

    def __init__(self, c: Config) -> None:
        c.require("is_moe", (False,), False)
        c.ignore("num_experts", "num_experts_per_tok", "norm_topk_prob")
        super().__init__(c)
        keep, window = c.get("keep_window_size", 2048), c.get("sliding_window")
        self.max_positions = keep if window is None or window > keep else None

    def make_window(self, c: Config, layer: int) -> Window:
        size = c.get("sliding_window")
        return Full() if size is None else Sliding(size)

    def make_block(self, c: Config, layer: int) -> nn.Module:
        norms = (self.make_norm(c) for _ in range(2))
        attention = DogeAttention(c, self.make_window(c, layer), c.get(*self.eps))
        return DogeBlock(attention, self.make_mlp(c, layer), attention_norm=next(norms), mlp_norm=next(norms))


class DogeAttention(nn.Module):
    def __init__(self, c: Config, window: Window, eps: float) -> None:
        super().__init__()
        bias, heads, self.head_dim = c.get("attention_bias", False), c.num_attention_heads, c.head_width
        kv_heads = c.get("num_key_value_heads", heads)
        self.parts = [heads, kv_heads, kv_heads]
        self.specs: LayerSpecs = {"attention": Attention(kv_heads, self.head_dim + MORE, self.head_dim, window)}
        self.qkv = Linear(c.hidden_size, sum(self.parts) * self.head_dim, bias=bias)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, eps), RMSNorm(self.head_dim, eps)
        self.dt = Linear(kv_heads * self.head_dim, kv_heads, bias=bias)
        self.A = nn.Parameter(torch.zeros(kv_heads))
        self.out = Linear(heads * self.head_dim, c.hidden_size, bias=bias)

    def forward(self, x: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.parts, dim=2)  # [B, T, heads, D] each
        bias = torch.exp(self.A * F.softplus(self.dt(v.flatten(2))))  # [B, T, KV heads]
        k = torch.cat([self.k_norm(k), F.pad(bias[..., None], (0, MORE - 1))], dim=-1)
        q = F.pad(self.q_norm(q), (0, MORE), value=self.head_dim**0.5)  # undoes the scale
        out = memory.attend(
            *(part.transpose(1, 2) for part in (q, k, v)), scale=self.head_dim**-0.5, rope=shared.ropes["default"]
        )  # [B, H, T, D]
        return self.out(out.transpose(1, 2).flatten(2), onto)


class DogeBlock(Block):
    """factor · x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, attention: DogeAttention, mlp: nn.Module, *, attention_norm: Norm, mlp_norm: Norm) -> None:
        super().__init__(attention, mlp, attention_norm=attention_norm, mlp_norm=mlp_norm)
        self.attention_residual = nn.Parameter(torch.ones(attention_norm.dim))
        self.mlp_residual = nn.Parameter(torch.ones(mlp_norm.dim))

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        assert self.attention_norm is not None and self.mlp_norm is not None
        x = self.attention(self.attention_norm(x), memory, shared, onto=self.attention_residual * x)
        return self.mlp(self.mlp_norm(x), onto=self.mlp_residual * x)
