"""Self-attention with grouped heads (GQA), the module that most families share.

q, k and v are one matrix, so one product computes them. Options cover differences between families; what only one
family has is in its own file.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.attention.window import Full, Window
from lamina.cache.memory import Memory
from lamina.cache.spec import Attention, LayerSpecs
from lamina.nn.attention.positions import Positions
from lamina.nn.linear import Linear
from lamina.nn.norm import Norm, RMSNorm


class SelfAttention(nn.Module):
    """Grouped-query attention over the layer's memory.

    value_dim       width of values; None: as keys
    rope            name of the RoPE table in `Positions.ropes`; None: no RoPE
    neighbours      RoPE pairs dimension 2i with 2i + 1, not i with i + half
    q_norm, k_norm  norms of queries and keys: of each head, or of all heads together if they are that wide
    norms_last      norms come after RoPE (RMS norms of each head only)
    factored        queries are multiplied by `Positions.factor`
    sinks           a learned logit per head takes part in the softmax
    clip            q, k and v are clamped to [-clip, clip], after norms of all heads together
    gated           the output is multiplied by the sigmoid of a gate [B, H, T, D], projected together with the queries
    factors         fixed multipliers, of the input and of the output
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        rope: str | None = "default",
        neighbours: bool = False,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        norms_last: bool = False,
        factored: bool = False,
        sinks: bool = False,
        clip: float | None = None,
        gated: bool = False,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        self.head_dim, self.scale = head_dim, head_dim**-0.5 if scale is None else scale
        self.softcap, self.clip = softcap, clip
        self.rope, self.neighbours, self.factored = rope, neighbours, factored
        self.in_factor, self.out_factor = factors
        value_dim = head_dim if value_dim is None else value_dim
        self.spec = Attention(kv_heads, head_dim, value_dim, window or Full())
        self.specs: LayerSpecs = {"attention": self.spec}
        gate = [(heads, value_dim)] if gated else []
        self.parts = [(heads, head_dim), *gate, (kv_heads, head_dim), (kv_heads, value_dim)]
        self.qkv = Linear(width, sum(count * dim for count, dim in self.parts), bias=bias)
        self.out = Linear(heads * value_dim, width, bias=out_bias)
        self.q_norm, self.k_norm, self.norms_last = q_norm, k_norm, norms_last
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None

    def forward(self, x: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        """x [B, T, width] -> [B, T, width]; `onto`: a residual that the result is added to."""
        flat = self.qkv(x, before=self.in_factor).split([count * dim for count, dim in self.parts], dim=-1)
        q, *gate, k, v = (part.unflatten(-1, sizes) for part, sizes in zip(flat, self.parts, strict=True))
        q, k, norms = self._normed(q, k)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        out = memory.attend(
            *(part.transpose(1, 2) for part in (q, k, v)),
            scale=self.scale, rope=None if self.rope is None else shared.ropes[self.rope], neighbours=self.neighbours,
            norms=norms, norms_last=self.norms_last, factor=shared.factor if self.factored else None,
            gate=gate[0].transpose(1, 2) if gate else None, softcap=self.softcap, sinks=self.sinks, bias=shared.bias,
        )  # fmt: skip
        return self.out(out.transpose(1, 2).flatten(2), onto, scale=self.out_factor)  # from [B, H, T, D]

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, tuple[RMSNorm, RMSNorm] | None]:
        """q and k [B, T, heads, D], normed; or as given, with the norms that `attend` computes."""
        if self.q_norm is None or self.k_norm is None:
            return q, k, None
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm) and self.q_norm.dim == self.head_dim:
            return q, k, (self.q_norm, self.k_norm)
        if self.q_norm.dim == self.head_dim:
            return self.q_norm(q), self.k_norm(k), None
        return (
            self.q_norm(q.flatten(2)).view(q.shape),  # all heads together
            self.k_norm(k.flatten(2)).view(k.shape),
            None,
        )
