"""The gated delta mixer: one projection to queries, keys, values, gates and decays; a short convolution; the rule.

    q, k, v, z, b, a = project(u)        q, k, v = act(convolve(q, k, v))        q, k = q / |q|, k / |k|
    y = gated delta(q, k, v, decay(a), sigmoid(b))        out(norm(y) · silu(z))

Everything between the two projections is one call, `memory.mix`.

https://arxiv.org/abs/2412.06464
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs, Recurrent
from lamina.nn.attention.positions import Positions
from lamina.nn.linear import Linear
from lamina.nn.recurrent.gated_norm import GatedRMSNorm
from lamina.nn.recurrent.short_conv import ShortConvolution
from lamina.recurrence import GatedDelta


class GatedDeltaMixer(nn.Module):
    """The output rows of `project` are q, k, v (inputs of the convolution), z, b, a, each for all its heads.

    doubled   strengths are 2 · sigmoid(b)
    """

    keep_float32 = ("A", "dt_bias")

    def __init__(
        self, width: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int, *,
        eps: float, act: str = "silu", doubled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.doubled = doubled
        self.rule = GatedDelta(key_heads, value_heads, key_dim, value_dim)
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.parts = [2 * keys + values, values, value_heads, value_heads]
        self.project = Linear(width, sum(self.parts), bias=False)
        self.conv = ShortConvolution(self.parts[0], kernel, bias=False, act=act)
        self.A = nn.Parameter(torch.full((value_heads,), -1.0))
        self.dt_bias = nn.Parameter(torch.zeros(value_heads))
        self.norm = GatedRMSNorm(value_dim, eps, gate_first=False)
        self.out = Linear(values, width, bias=False)
        self.specs: LayerSpecs = {"conv": self.conv.spec, "state": Recurrent(self.rule)}

    def forward(self, u: Tensor, memory: Memory, shared: Positions | None = None, onto: Tensor | None = None) -> Tensor:
        qkv, z, b, a = self.project(u).split(self.parts, dim=-1)
        y = memory.mix(
            self.rule, qkv, {"g": a, "beta": b}, {}, conv=self.conv, gate=z, norm=self.norm,
            around={"unit": True, "gates": (self.A, self.dt_bias), "doubled": self.doubled},
        )  # fmt: skip
        return self.out(y, onto)


def regroup_by_part(heads: int, *sizes: int) -> Callable[[Tensor], Tensor]:
    """Makes a function that reorders stored rows from [heads, parts] to [parts, heads] order; sizes: rows per part.

    >>> regroup_by_part(2, 1, 2)(torch.tensor([10, 11, 12, 20, 21, 22])).tolist()
    [10, 20, 11, 12, 21, 22]
    """

    def reorder(stored: Tensor) -> Tensor:
        parts = stored.unflatten(0, (heads, sum(sizes))).split(sizes, dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    return reorder
