"""`Gpt`: the base of families with LayerNorm, a plain MLP and biases; and what their checkpoints have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lamina.checkpoint.names import From
from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import MLP, Embedding, LayerNorm, Norm, SelfAttention


class Gpt(Transformer):
    eps = ("layer_norm_epsilon", 1e-5)
    act = ("activation_function", "gelu_new")
    tied = True
    learned_positions: ClassVar[bool] = False
    """True: a learned vector per position is added to the embeddings, and there is no RoPE."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        if self.learned_positions:
            self.max_positions = c.max_position_embeddings
            self.position = Embedding(c.max_position_embeddings, c.hidden_size)

    def make_norm(self, c: Config) -> Norm:
        return LayerNorm(c.hidden_size, c.get(*self.eps))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        bias = c.get("attention_bias", True)
        rope = None if self.learned_positions else "default"
        return super().make_attention(c, layer, **dict(bias=bias, out_bias=bias, rope=rope) | options)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        inner = c.get("intermediate_size", 4 * c.hidden_size)
        return MLP(c.hidden_size, inner, c.get(*self.act), c.get("mlp_bias", True))

    def make_rope(self, c: Config) -> Any:
        return None if self.learned_positions else super().make_rope(c)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.position(positions, onto=x) if self.learned_positions else x


def transposed(name: str) -> From:
    """A tensor that is stored [in, out] (`Conv1D` of transformers); a bias is taken as it is."""
    return From(name, torch.t)


def split_groups(kv_heads: int, head_dim: int) -> Callable[[Tensor], Tensor]:
    """For a q, k and v that are stored KV head by KV head: its queries, its key, its value. -> all q, all k, all v

    >>> split_groups(2, 1)(torch.tensor([10, 11, 20, 30, 12, 13, 21, 31])).tolist()
    [10, 11, 12, 13, 20, 21, 30, 31]
    """

    def split(t: Tensor) -> Tensor:
        heads = t.unflatten(0, (kv_heads, -1, head_dim))
        return torch.cat([heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)])

    return split
