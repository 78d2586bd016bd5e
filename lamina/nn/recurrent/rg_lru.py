"""The recurrent mixer of Griffin: a short convolution and RG-LRU on one branch, gated by the other.

    x, z = project(u)        x = convolve(x)        out(rg_lru(x) · act(z))

https://arxiv.org/abs/2402.19427
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.activation import activation
from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs, Recurrent
from lamina.checkpoint.names import From, Value
from lamina.nn.attention.positions import Positions
from lamina.nn.linear import Linear
from lamina.nn.recurrent.short_conv import ShortConvolution
from lamina.recurrence import RGLRU
from lamina.recurrence.rg_lru import Gates


class RGLRUMixer(nn.Module):
    """inner: channels of the recurrence, in `heads` blocks; a gate of a channel reads the channels of its own block."""

    keep_float32 = ("rate",)

    def __init__(self, width: int, inner: int, heads: int, kernel: int, *, act: str) -> None:
        super().__init__()
        activation(act)  # raises if it is not known
        self.act = act
        self.rule = RGLRU(inner)
        self.project = Linear(width, 2 * inner)
        self.conv = ShortConvolution(inner, kernel)
        self.open_weight = nn.Parameter(torch.zeros(inner, inner // heads))
        self.open_bias = nn.Parameter(torch.zeros(inner))
        self.decay_weight = nn.Parameter(torch.zeros(inner, inner // heads))
        self.decay_bias = nn.Parameter(torch.zeros(inner))
        self.rate = nn.Parameter(torch.full((inner,), -1.0))
        self.out = Linear(inner, width)
        self.specs: LayerSpecs = {"conv": self.conv.spec, "state": Recurrent(self.rule)}

    def forward(self, u: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        x, z = self.project(u).chunk(2, dim=-1)  # [B, T, inner] each
        gates = Gates(self.open_weight, self.open_bias, self.decay_weight, self.decay_bias, self.rate)
        around = {"gates": gates, "positions": memory.positions, "gate": z, "act": self.act}
        return self.out(memory.recur(self.rule, {"x": self.conv(x, memory)}, {}, around=around), onto)


def rg_lru_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names: the mixer at `ours` is loaded from the checkpoint's recurrent block at `theirs`."""
    unit = f"{theirs}.rg_lru"
    return {
        f"{ours}.project": (f"{theirs}.linear_x", f"{theirs}.linear_y"),
        f"{ours}.conv": f"{theirs}.conv_1d",
        f"{ours}.conv.weight": From(f"{theirs}.conv_1d.weight", lambda t: t.squeeze(1)),
        f"{ours}.open_weight": From(f"{unit}.input_gate_weight", _rows),
        f"{ours}.open_bias": From(f"{unit}.input_gate_bias", torch.flatten),
        f"{ours}.decay_weight": From(f"{unit}.recurrent_gate_weight", _rows),
        f"{ours}.decay_bias": From(f"{unit}.recurrent_gate_bias", torch.flatten),
        f"{ours}.rate": From(f"{unit}.recurrent_param", lambda t: -8.0 * F.softplus(t.float())),
        f"{ours}.out": f"{theirs}.linear_out",
    }


def _rows(stored: Tensor) -> Tensor:
    """[heads, in, out] -> one row per output, [heads · out, in]"""
    return stored.transpose(1, 2).flatten(0, 1)
