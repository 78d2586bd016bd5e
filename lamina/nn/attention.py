"""Self-attention with grouped heads, the block most families share.

q, k and v are one matrix, since they are read together. Options cover what families differ in; what is unusual in one
family alone stays in its file.
"""

from __future__ import annotations

from torch import Tensor, nn

from lamina.attention.reference import Bias
from lamina.attention.window import Full, Window
from lamina.cache.memory import Memory
from lamina.cache.spec import Attention
from lamina.nn.rotary import Table, rotate


class SelfAttention(nn.Module):
    """Grouped-query attention over the layer's memory."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        out_bias: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.spec = Attention(kv_heads, head_dim, head_dim, window or Full())
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, width, bias=out_bias)
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(self, x: Tensor, memory: Memory, rope: Table | None, bias: Bias | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads + 2 kv, T, D]
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        out = memory.attend(q, k, v, scale=self.scale, softcap=self.softcap, bias=bias)  # [B, H, T, D]
        return self.out(out.transpose(1, 2).flatten(2))
