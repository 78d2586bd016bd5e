"""A lightning indexer: selects the few tokens that latent attention reads (DeepSeek sparse attention).

Its keys are small, and stored for every token. Only the first dimensions of a head, as many as attention rotates, are
rotated.

https://arxiv.org/abs/2512.02556
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina.attention.rotary import RopeTable
from lamina.cache.memory import Memory
from lamina.cache.spec import IndexKeys
from lamina.config import Config
from lamina.nn.linear import Linear
from lamina.nn.norm import LayerNorm


class Indexer(nn.Module):
    """neighbours   how RoPE pairs dimensions: see lamina.attention.rotary"""

    def __init__(self, c: Config, neighbours: bool) -> None:
        super().__init__()
        self.heads, self.dim, self.neighbours = c.index_n_heads, c.index_head_dim, neighbours
        self.scale = (self.heads * self.dim) ** -0.5
        self.spec = IndexKeys(self.dim, top=c.index_topk)
        self.q_up = Linear(c.q_lora_rank, self.heads * self.dim, bias=False)
        self.k_weights = Linear(c.hidden_size, self.dim + self.heads, bias=False)
        self.k_norm = LayerNorm(self.dim, 1e-6)

    def forward(self, x: Tensor, q: Tensor, memory: Memory, rope: RopeTable) -> Any:
        """x [B, T, width], q [B, T, q_rank]: the latent of the queries -> the selection, for `memory.attend_latent`"""
        k, weights = self.k_weights(x).split([self.dim, self.heads], dim=-1)
        return memory.select(
            self.q_up(q).unflatten(-1, (self.heads, -1)).transpose(1, 2),  # [B, H, T, D]
            self.k_norm(k),  # [B, T, D]
            weights.to(torch.promote_types(weights.dtype, torch.float32)) * self.scale,  # [B, T, H]
            rope=rope,
            neighbours=self.neighbours,
        )
