"""The mixer of Kimi Delta Attention: a gated delta mixer with one decay per key channel.

    q, k, v, b, a, z = project(u)        q, k, v = act(convolve(q, k, v))        q, k = q / |q|, k / |k|
    y = channel delta(q, k, v, decay(decay_up(a)), sigmoid(b))        out(norm(y) · sigmoid(gate_up(z)))

The decays and the output gate are projected through a rank as small as one head.

https://arxiv.org/abs/2510.26692
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs, Recurrent
from lamina.checkpoint.names import Either, From, Value
from lamina.nn.attention.positions import Positions
from lamina.nn.linear import Linear
from lamina.nn.recurrent.gated_norm import GatedRMSNorm
from lamina.nn.recurrent.short_conv import ShortConvolution
from lamina.recurrence import ChannelDelta


class ChannelDeltaMixer(nn.Module):
    """The output rows of `project` are q, k, v (inputs of the convolution), each for all heads, then b, a, z."""

    keep_float32 = ("A", "dt_bias")

    def __init__(self, width: int, heads: int, head_dim: int, kernel: int, *, eps: float, act: str = "silu") -> None:
        super().__init__()
        self.rule = ChannelDelta(heads, head_dim, head_dim)
        inner = heads * head_dim
        self.parts = [3 * inner, heads, head_dim, head_dim]
        self.project = Linear(width, sum(self.parts), bias=False)
        self.conv = ShortConvolution(3 * inner, kernel, bias=False, act=act)
        self.decay_up = Linear(head_dim, inner, bias=False)
        self.gate_up = Linear(head_dim, inner, bias=False)
        self.A = nn.Parameter(torch.full((heads,), -1.0))
        self.dt_bias = nn.Parameter(torch.zeros(heads, head_dim))
        self.norm = GatedRMSNorm(head_dim, eps, gate_first=False, sigmoid=True)
        self.out = Linear(inner, width, bias=False)
        self.specs: LayerSpecs = {"conv": self.conv.spec, "state": Recurrent(self.rule)}

    def forward(self, u: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        qkv, b, a, z = self.project(u).split(self.parts, dim=-1)
        g = self.decay_up(a).unflatten(-1, (self.rule.heads, -1))
        y = memory.mix(
            self.rule, qkv, {"g": g, "beta": b}, {}, conv=self.conv, gate=self.gate_up(z), norm=self.norm,
            around={"unit": True, "gates": (self.A, self.dt_bias)},
        )  # fmt: skip
        return self.out(y, onto)


def channel_delta_names(ours: str, theirs: str, head_dim: int) -> dict[str, Value]:
    """Parameter names: the mixer at `ours` is loaded from the checkpoint's module at `theirs`."""

    def squeezed(name: str) -> From:
        return From(f"{theirs}.{name}.weight", lambda t: t.squeeze(1))

    def either(name: str, leaf: str = "") -> tuple[str, str]:
        return f"{theirs}.{name}{leaf}", f"{theirs}.forget_gate.{name}{leaf}"

    rows = [f"{theirs}.{name}_proj" for name in ("q", "k", "v", "b")]
    return {
        f"{ours}.project": Either(*((*rows, low, f"{theirs}.g_a_proj") for low in either("f_a_proj"))),
        f"{ours}.conv.weight": Either(tuple(map(squeezed, ("q_conv1d", "k_conv1d", "v_conv1d"))), squeezed("conv1d")),
        f"{ours}.decay_up": Either(*either("f_b_proj")),
        f"{ours}.gate_up": f"{theirs}.g_b_proj",
        f"{ours}.A": Either(*(From(name, lambda t: -t.float().exp().flatten()) for name in either("A_log"))),
        f"{ours}.dt_bias": Either(
            *(From(name, lambda t: t.unflatten(0, (-1, head_dim))) for name in either("dt_bias"))
        ),
        f"{ours}.norm": f"{theirs}.o_norm",
        f"{ours}.out": f"{theirs}.o_proj",
    }
