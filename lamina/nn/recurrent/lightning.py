"""Lightning attention: linear attention with a fixed decay per head, then a norm with a sigmoid gate.

    q, k, v = act(qkv(u))        S = exp(-slope) S + v kᵀ        out(norm(S q) · sigmoid(gate(u)))

This is the state-space rule (`SSD`) with step sizes of one: x = v, B = k, C = q, A = -slope.

https://arxiv.org/abs/2401.04658
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.activation import activation
from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs, Recurrent
from lamina.nn.attention.positions import Positions
from lamina.nn.linear import Linear
from lamina.nn.recurrent.gated_norm import GatedRMSNorm
from lamina.recurrence import SSD


class LightningMixer(nn.Module):
    """The output rows of `qkv` are q, k, v, each for all heads.

    decay    factor on the slopes of the layer; slopes themselves fall geometrically over the heads
    factor   a fixed multiplier of the output
    """

    A: Tensor  # [heads] -slope
    ones: Tensor  # [heads] the step sizes

    def __init__(
        self, width: int, heads: int, head_dim: int, *, decay: float, act: str, eps: float, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.heads, self.decay, self.factor = heads, decay, factor
        self.act = activation(act)
        self.rule = SSD(heads, head_dim, head_dim, groups=heads)
        self.qkv = Linear(width, 3 * heads * head_dim, bias=False)
        self.gate = Linear(width, heads * head_dim, bias=False)
        self.norm = GatedRMSNorm(heads * head_dim, eps, gate_first=False, sigmoid=True)
        self.out = Linear(heads * head_dim, width, bias=False)
        self.register_buffer("A", torch.empty(heads), persistent=False)
        self.register_buffer("ones", torch.empty(heads), persistent=False)
        self.specs: LayerSpecs = {"state": Recurrent(self.rule)}
        if not self.A.is_meta:
            self.reset_buffers()

    def reset_buffers(self) -> None:
        slopes = 2.0 ** (-8 / self.heads * torch.arange(1, self.heads + 1))
        self.A, self.ones = -slopes * self.decay, torch.ones(self.heads)

    def forward(self, u: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in self.qkv(u, act=self.act).chunk(3, dim=-1))
        inputs = {"x": v, "dt": self.ones.expand(*u.shape[:2], -1), "B": k, "C": q}
        y = memory.recur(self.rule, inputs, {"A": self.A}).flatten(2)
        return self.out(self.norm(y, self.gate(u)), onto, scale=self.factor)
