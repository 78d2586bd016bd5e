"""Multi-head latent attention (MLA): the cache stores one latent and one rotary key per token, shared by all heads.

    latent, k_rope = down(x)        head h: softmax(q · [up_k(latent) | k_rope]) · up_v(latent)

https://arxiv.org/abs/2405.04434
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import Latent, LayerSpecs, SharedIndex
from lamina.config import Config
from lamina.nn.attention.indexer import Indexer
from lamina.nn.attention.positions import Positions
from lamina.nn.attention.rope_settings import rope_parameters
from lamina.nn.attention.rotary import yarn_scale
from lamina.nn.linear import Linear
from lamina.nn.norm import RMSNorm


class LatentAttention(nn.Module):
    """indexer   restricts attention to the tokens that it selects
    source    index of a layer whose selection restricts attention
    """

    def __init__(self, c: Config, *, indexer: Indexer | None = None, source: int | None = None) -> None:
        super().__init__()
        bias = c.get("attention_bias", False)
        self.heads, self.rank, self.q_rank = c.num_attention_heads, c.kv_lora_rank, c.q_lora_rank
        nope_dim, rope_dim, value_dim = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.neighbours = c.get("rope_interleave", True)
        self.scale = score_scale(c)
        self.spec = Latent(self.rank, rope_dim)
        self.indexer, self.source = indexer, source
        index = {} if source is None else {"index": SharedIndex(source)}
        self.specs: LayerSpecs = {**(index if indexer is None else {"index": indexer.spec}), "attention": self.spec}
        q_dim, kv_dim = self.heads * (nope_dim + rope_dim), self.rank + rope_dim
        if self.q_rank is None:
            self.q_kv = Linear(c.hidden_size, q_dim + kv_dim, bias=False)
            self.kv_bias = nn.Parameter(torch.zeros(kv_dim)) if bias else None
        else:
            self.down = Linear(c.hidden_size, self.q_rank + kv_dim, bias=bias)
            self.q_norm = RMSNorm(self.q_rank)
            self.q_up = Linear(self.q_rank, q_dim, bias=False)
        self.kv_norm = RMSNorm(self.rank)
        self.kv_up = nn.Parameter(torch.zeros(self.heads * (nope_dim + value_dim), self.rank))
        self.out = Linear(self.heads * value_dim, c.hidden_size, bias=bias)

    def forward(self, x: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        kv_dim, rope = self.rank + self.spec.rope_dim, shared.ropes["default"]
        chosen = None if self.source is None else memory.select()
        if self.q_rank is None:
            q, kv = self.q_kv(x).tensor_split([-kv_dim], dim=-1)
            kv = kv if self.kv_bias is None else kv + self.kv_bias
        else:
            q, kv = self.down(x).tensor_split([-kv_dim], dim=-1)
            q = self.q_norm(q)
            if self.indexer is not None:
                chosen = self.indexer(x, q, memory, rope)
            q = self.q_up(q)
        out = memory.attend_latent(
            q.unflatten(-1, (self.heads, -1)).transpose(1, 2),  # [B, H, T, N + P]
            kv,  # [B, T, rank + P]
            norm=self.kv_norm,
            rope=rope,
            neighbours=self.neighbours,
            up=self.kv_up.unflatten(0, (self.heads, -1)),
            scale=self.scale,
            restrict=chosen,
        )  # [B, H, T, V]
        return self.out(out.transpose(1, 2).flatten(2), onto)


def score_scale(c: Config) -> float:
    """The factor on attention scores, larger if YaRN scales positions beyond the trained context."""
    settings = rope_parameters(c, more=("factor", "mscale_all_dim"))
    stretched = settings["rope_type"] != "default" and settings.get("mscale_all_dim")
    sharper = yarn_scale(settings["factor"], settings["mscale_all_dim"]) if stretched else 1.0
    return sharper**2 * (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
