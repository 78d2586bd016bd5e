"""The Mamba-2 mixer: one projection to gate, values, B, C and step sizes; a short convolution; the state-space rule.

    z, xBC, dt = project(u)        x, B, C = act(convolve(xBC))        y = ssd(x, dt, B, C) + D x        out(norm(y, z))

Everything between the two projections is one call, `memory.mix`.

https://arxiv.org/abs/2405.21060
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs, Recurrent
from lamina.checkpoint.names import From, Value
from lamina.nn.attention.positions import Positions
from lamina.nn.linear import Linear
from lamina.nn.recurrent.gated_norm import GatedRMSNorm
from lamina.nn.recurrent.short_conv import ShortConvolution
from lamina.recurrence import SSD


class Mamba2Mixer(nn.Module):
    """Options cover differences between families.

    dt_limit  (low, high) that step sizes are clamped to
    norm      the gated norm; None: y · silu(z)
    scales    multipliers of the five parts of the projection: z, x, B, C, dt
    factors   multipliers of the input and of the output
    """

    keep_float32 = ("A", "D", "dt_bias")

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        state: int,
        groups: int,
        kernel: int,
        *,
        act: str = "silu",
        bias: bool = False,
        conv_bias: bool = True,
        out_bias: bool = False,
        dt_limit: Sequence[float] = (0.0, math.inf),
        norm: GatedRMSNorm | None = None,
        scales: Sequence[float] = (1.0, 1.0, 1.0, 1.0, 1.0),
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        self.in_factor, self.out_factor = factors
        self.rule = SSD(heads, head_dim, state, groups)
        inner, shared = heads * head_dim, groups * state
        self.parts, self.scales = [inner, inner, shared, shared, heads], list(scales)
        self.project = Linear(width, sum(self.parts), bias=bias)
        self.conv = ShortConvolution(inner + 2 * shared, kernel, bias=conv_bias, act=act)
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.dt_limit = (dt_limit[0], dt_limit[1])
        self.A = nn.Parameter(torch.full((heads,), -1.0))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = norm
        self.out = Linear(inner, width, bias=out_bias)
        self.specs: LayerSpecs = {"conv": self.conv.spec, "state": Recurrent(self.rule)}
        self.scale: Tensor | None
        scaled = any(scale != 1 for scale in self.scales)
        self.register_buffer("scale", torch.empty(sum(self.parts)) if scaled else None, persistent=False)
        if not self.A.is_meta:
            self.reset_buffers()

    def reset_buffers(self) -> None:
        if self.scale is not None:
            self.scale = torch.cat([torch.full((n,), scale) for n, scale in zip(self.parts, self.scales, strict=True)])

    def forward(self, u: Tensor, memory: Memory, shared: Positions | None = None, onto: Tensor | None = None) -> Tensor:
        inner, _, grouped, _, heads = self.parts
        projected = self.project(u, before=self.in_factor, scale=1.0 if self.scale is None else self.scale)
        z, xBC, dt = projected.split([inner, inner + 2 * grouped, heads], dim=-1)
        y = memory.mix(
            self.rule, xBC, {"dt": dt}, {"A": self.A}, conv=self.conv, gate=z, norm=self.norm,
            around={"dt_bias": self.dt_bias, "dt_limit": self.dt_limit, "skip": self.D},
        )  # fmt: skip
        return self.out(y, onto, scale=self.out_factor)


def mamba2_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names: the mixer at `ours` is loaded from the checkpoint's mixer at `theirs`."""
    return {
        f"{ours}.project": f"{theirs}.in_proj",
        f"{ours}.conv": f"{theirs}.conv1d",
        f"{ours}.conv.weight": From(f"{theirs}.conv1d.weight", lambda t: t.squeeze(1)),
        f"{ours}.dt_bias": f"{theirs}.dt_bias",
        f"{ours}.A": From(f"{theirs}.A_log", lambda t: -t.float().exp()),
        f"{ours}.D": f"{theirs}.D",
        f"{ours}.norm": f"{theirs}.norm",
        f"{ours}.out": f"{theirs}.out_proj",
    }
