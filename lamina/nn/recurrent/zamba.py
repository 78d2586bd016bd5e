"""The Mamba mixer of Zamba: channels are divided into heads, each with its own selection (dt, B, C) and state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs, Recurrent
from lamina.checkpoint.names import From, Value
from lamina.nn.attention.positions import Positions
from lamina.nn.linear import Linear
from lamina.nn.recurrent.short_conv import ShortConvolution
from lamina.recurrence import SelectiveScan


class ZambaMixer(nn.Module):
    """As `MambaMixer`, in `heads` parts of the `inner` channels; rank: of each projection to step sizes."""

    keep_float32 = ("A", "D", "dt_bias")

    def __init__(
        self, width: int, inner: int, heads: int, state: int, rank: int, kernel: int, *,
        act: str, bias: bool, conv_bias: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        dim = inner // heads
        self.heads, self.rank = heads, rank
        self.rule = SelectiveScan(dim, state)
        self.project = Linear(width, 2 * inner, bias=bias)
        self.conv = ShortConvolution(inner, kernel, bias=conv_bias, act=act)
        self.select = nn.Parameter(torch.zeros(heads, rank + 2 * state, dim))
        self.dt = nn.Parameter(torch.zeros(heads, dim, rank))
        self.dt_bias = nn.Parameter(torch.zeros(heads, dim))
        self.A = nn.Parameter(torch.full((heads, dim, state), -1.0))
        self.D = nn.Parameter(torch.ones(heads, dim))
        self.out = Linear(inner, width, bias=bias)
        states = {f"state{head}": Recurrent(self.rule) for head in range(heads)}
        self.specs: LayerSpecs = {"conv": self.conv.spec, **states}

    def forward(self, u: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        x, z = self.project(u).chunk(2, dim=-1)
        x, z = (part.unflatten(-1, (self.heads, -1)) for part in (self.conv(x, memory), z))  # [B, T, heads, dim]
        selected = torch.einsum("bthd,hrd->bthr", x, self.select)
        dt, B, C = selected.split([self.rank, self.rule.state, self.rule.state], dim=-1)
        dt = torch.einsum("bthr,hdr->bthd", dt, self.dt)
        y = [
            memory.recur(
                self.rule,
                {"x": x[:, :, h], "dt": dt[:, :, h], "B": B[:, :, h], "C": C[:, :, h]},
                {"A": self.A[h]},
                around={"dt_bias": self.dt_bias[h], "skip": self.D[h], "gate": z[:, :, h]},
                name=f"state{h}",
            )
            for h in range(self.heads)
        ]
        return self.out(torch.cat(y, dim=-1), onto)


def zamba_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names. Checkpoints interleave the rows of values and gates."""
    return {
        f"{ours}.project": From(f"{theirs}.in_proj", lambda t: t.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)),
        f"{ours}.conv": f"{theirs}.conv1d",
        f"{ours}.conv.weight": From(f"{theirs}.conv1d.weight", lambda t: t.squeeze(1)),
        f"{ours}.select": f"{theirs}.x_proj_weight",
        f"{ours}.dt": f"{theirs}.dt_proj_weight",
        f"{ours}.dt_bias": f"{theirs}.dt_proj_bias",
        f"{ours}.A": From(f"{theirs}.A_log", lambda t: -t.float().exp()),
        f"{ours}.D": f"{theirs}.D",
        f"{ours}.out": f"{theirs}.out_proj",
    }
