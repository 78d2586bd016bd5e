"""The Mamba mixer: a short convolution and a selective scan between two projections.

    x, z = project(u)        x = act(convolve(x))        dt, B, C from x        out((scan(x, dt, B, C) + D x) · silu(z))

https://arxiv.org/abs/2312.00752
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs, Recurrent
from lamina.checkpoint.names import From, Value
from lamina.nn.attention.positions import Positions
from lamina.nn.linear import Linear
from lamina.nn.norm import RMSNorm
from lamina.nn.recurrent.short_conv import ShortConvolution
from lamina.recurrence import SelectiveScan


class MambaMixer(nn.Module):
    """rank: of the projection to step sizes; norms: RMS norms of dt (`rank` wide), B and C, with one epsilon."""

    keep_float32 = ("A", "D", "dt_bias")

    def __init__(
        self,
        width: int,
        inner: int,
        state: int,
        rank: int,
        kernel: int,
        *,
        act: str = "silu",
        bias: bool = False,
        conv_bias: bool = True,
        norms: tuple[RMSNorm, RMSNorm, RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.rule = SelectiveScan(inner, state)
        self.project = Linear(width, 2 * inner, bias=bias)
        self.conv = ShortConvolution(inner, kernel, bias=conv_bias, act=act)
        self.select = Linear(inner, rank + 2 * state, bias=False)
        self.dt_norm: RMSNorm | None
        self.B_norm: RMSNorm | None
        self.C_norm: RMSNorm | None
        self.dt_norm, self.B_norm, self.C_norm = (None, None, None) if norms is None else norms
        self.dt = Linear(rank, inner, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.A = nn.Parameter(torch.full((inner, state), -1.0))
        self.D = nn.Parameter(torch.ones(inner))
        self.out = Linear(inner, width, bias=bias)
        self.specs: LayerSpecs = {"conv": self.conv.spec, "state": Recurrent(self.rule)}

    def forward(self, u: Tensor, memory: Memory, shared: Positions | None = None, onto: Tensor | None = None) -> Tensor:
        x, z = self.project(u).chunk(2, dim=-1)  # [B, T, C] each
        x, selected = memory.convolve_product(x, self.conv, self.select)
        dt, B, C = selected.split([self.rank, self.rule.state, self.rule.state], dim=-1)
        around: dict[str, Any] = {"dt_bias": self.dt_bias, "skip": self.D, "gate": z}
        if self.B_norm is not None and self.C_norm is not None:
            around["norms"] = self.B_norm.eps, self.B_norm.weight, self.C_norm.weight
        around |= {"dt_product": self.dt, "dt_norm": self.dt_norm}
        y = memory.recur(self.rule, {"x": x, "dt": dt, "B": B, "C": C}, {"A": self.A}, around=around)
        return self.out(y, onto)


def mamba_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names: the mixer at `ours` is loaded from the checkpoint's mixer at `theirs`."""
    return {
        f"{ours}.project": f"{theirs}.in_proj",
        f"{ours}.conv": f"{theirs}.conv1d",
        f"{ours}.conv.weight": From(f"{theirs}.conv1d.weight", lambda t: t.squeeze(1)),
        f"{ours}.select": f"{theirs}.x_proj",
        f"{ours}.dt_norm": f"{theirs}.dt_layernorm",
        f"{ours}.B_norm": f"{theirs}.b_layernorm",
        f"{ours}.C_norm": f"{theirs}.c_layernorm",
        f"{ours}.dt": f"{theirs}.dt_proj",
        f"{ours}.dt_bias": f"{theirs}.dt_proj.bias",
        f"{ours}.A": From(f"{theirs}.A_log", lambda t: -t.float().exp()),
        f"{ours}.D": f"{theirs}.D",
        f"{ours}.out": f"{theirs}.out_proj",
    }
