"""Cross-attention: queries from the decoder, keys and values from the encoder's output (the source)."""

from __future__ import annotations

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import Cross
from lamina.nn.linear import Linear


class CrossAttention(nn.Module):
    """Keys and values are computed once, when a source is attached, so their matrix is separate from that of q.

    bias           whether q, k and v have biases; where k alone has none, its part of `kv.bias` is zero
    source_width   width of the source's states; None: as the decoder's
    kv_heads       heads of keys and values (GQA); None: as many as of queries
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
        source_width: int | None = None,
        kv_heads: int | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.heads, self.head_dim = heads, head_dim
        self.scale, self.softcap = head_dim**-0.5 if scale is None else scale, softcap
        self.spec = Cross(kv_heads, head_dim, head_dim)
        self.q = Linear(width, heads * head_dim, bias=bias)
        self.kv = Linear(width if source_width is None else source_width, 2 * kv_heads * head_dim, bias=bias)
        self.out = Linear(heads * head_dim, width, bias=out_bias)

    def read(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the source. states [B, S, source width] -> [B, H, S, D] each"""
        k, v = self.kv(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).chunk(2, dim=1)
        return k, v

    def forward(self, x: Tensor, memory: Memory, onto: Tensor | None = None) -> Tensor:
        """x [B, T, width] -> [B, T, width]; `onto`: a residual that the result is added to."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, D]
        out = memory.attend(q, scale=self.scale, softcap=self.softcap)
        return self.out(out.transpose(1, 2).flatten(2), onto)
