"""Cross-attention: queries from the decoder, keys and values from the encoder's output (the source)."""

from __future__ import annotations

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import Cross
from lamina.nn.linear import Linear


class CrossAttention(nn.Module):
    """Keys and values are computed once, when a source is attached, so their matrix is separate from that of q."""

    def __init__(self, width: int, heads: int, head_dim: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.spec = Cross(heads, head_dim, head_dim)
        self.q = Linear(width, heads * head_dim, bias=False)
        self.kv = Linear(width, 2 * heads * head_dim, bias=False)
        self.out = Linear(heads * head_dim, width, bias=False)

    def read(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the source. states [B, S, width] -> [B, H, S, D] each"""
        k, v = self.kv(states).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2).chunk(2, dim=1)
        return k, v

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, D]
        return self.out(memory.attend(q, scale=self.scale).transpose(1, 2).flatten(2))
