"""Self-attention with grouped heads (GQA), the module that most families share.

q, k and v are one matrix, so one product computes them. Options cover differences between families; what only one
family has is in its own file.
"""

from __future__ import annotations

from torch import Tensor, nn

from lamina.attention.reference import Bias
from lamina.attention.window import Full, Window
from lamina.cache.memory import Memory
from lamina.cache.spec import Attention
from lamina.nn.attention.rotary import RopeTable
from lamina.nn.linear import Linear
from lamina.nn.norm import RMSNorm


class SelfAttention(nn.Module):
    """Grouped-query attention over the layer's memory.

    gated    the output is multiplied by the sigmoid of a gate [B, H, T, D], projected together with the queries
    factors  fixed multipliers, of the input and of the output
    """

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
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        gated: bool = False,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.in_factor, self.out_factor = factors
        self.spec = Attention(kv_heads, head_dim, head_dim, window or Full())
        self.parts = [heads, heads, kv_heads, kv_heads] if gated else [heads, kv_heads, kv_heads]
        self.qkv = Linear(width, sum(self.parts) * head_dim, bias=bias)
        self.out = Linear(heads * head_dim, width, bias=out_bias)
        self.q_norm, self.k_norm = q_norm, k_norm

    def forward(
        self,
        x: Tensor,
        memory: Memory,
        rope: RopeTable | None,
        bias: Bias | None = None,
        onto: Tensor | None = None,  # a residual that the result is added to
    ) -> Tensor:
        qkv = self.qkv(x, before=self.in_factor).unflatten(-1, (-1, self.head_dim))  # [B, T, heads + 2 kv, D]
        q, *gate, k, v = qkv.transpose(1, 2).split(self.parts, dim=1)
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        out = memory.attend(
            q, k, v, scale=self.scale, rope=rope, norms=norms, gate=gate[0] if gate else None, softcap=self.softcap,
            bias=bias,
        )  # fmt: skip
        return self.out(out.transpose(1, 2).flatten(2), onto, scale=self.out_factor)  # from [B, H, T, D]
