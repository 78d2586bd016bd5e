"""The two mixers of RWKV-4, each of which first mixes every token with the one before it (token shift).

    time      k, v, r from shifted x        out(sigmoid(r) · wkv(k, v))
    channel   k, r from shifted x           sigmoid(r) · down(relu(up(k))²)

A token shift, m x_t + (1 - m) x_{t-1} per channel, is a causal convolution of two taps.

https://arxiv.org/abs/2305.13048
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.activation import relu2
from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs, Recurrent
from lamina.checkpoint.names import From, Value
from lamina.nn.attention.positions import Positions
from lamina.nn.linear import Linear
from lamina.nn.recurrent.short_conv import ShortConvolution
from lamina.recurrence import WKV


class TokenShift(nn.Module):
    """`mixes` mixtures of each token with the one before it, by taps [mixes · width, 2]."""

    def __init__(self, width: int, mixes: int) -> None:
        super().__init__()
        self.mixes = mixes
        self.conv = ShortConvolution(mixes * width, 2, bias=False)

    def forward(self, x: Tensor, memory: Memory) -> tuple[Tensor, ...]:
        return self.conv(x.repeat(1, 1, self.mixes), memory).chunk(self.mixes, dim=-1)


class TimeMixer(nn.Module):
    """inner: channels of WKV; factor: a fixed multiplier of the output."""

    keep_float32 = ("w", "first")

    def __init__(self, width: int, inner: int, *, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.rule = WKV(inner)
        self.shift = TokenShift(width, 3)
        self.key, self.value, self.receptance = (Linear(width, inner, bias=False) for _ in range(3))
        self.w = nn.Parameter(torch.full((inner,), -1.0))
        self.first = nn.Parameter(torch.zeros(inner))
        self.out = Linear(inner, width, bias=False)
        self.specs: LayerSpecs = {"time_shift": self.shift.conv.spec, "state": Recurrent(self.rule)}

    def forward(self, u: Tensor, memory: Memory, shared: Positions, onto: Tensor | None = None) -> Tensor:
        k, v, r = self.shift(u, memory["time_shift"])
        inputs, constants = {"k": self.key(k), "v": self.value(v)}, {"w": self.w, "first": self.first}
        y = memory.recur(self.rule, inputs, constants, around={"gate": self.receptance(r)})
        return self.out(y, onto, scale=self.factor)


class ChannelMixer(nn.Module):
    """inner: width of the MLP; factor: a fixed multiplier of the output."""

    def __init__(self, width: int, inner: int, *, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.shift = TokenShift(width, 2)
        self.up = Linear(width, inner, bias=False)
        self.receptance = Linear(width, width, bias=False)
        self.down = Linear(inner, width, bias=False)
        self.specs: LayerSpecs = {"channel_shift": self.shift.conv.spec}

    def forward(self, u: Tensor, memory: Memory, onto: Tensor | None = None) -> Tensor:
        k, r = self.shift(u, memory["channel_shift"])
        y = self.receptance(r).sigmoid() * self.down(self.up(k, act=relu2), scale=self.factor)
        return y if onto is None else onto + y


def rwkv_names(time: str, channel: str, attention: str, feed_forward: str) -> dict[str, Value]:
    """Parameter names of the two mixers and of the checkpoint's modules."""

    def taps(name: str) -> From:
        return From(name, lambda m: torch.stack([1 - m.flatten(), m.flatten()], -1))

    return {
        f"{time}.shift.conv.weight": tuple(taps(f"{attention}.time_mix_{n}") for n in ("key", "value", "receptance")),
        f"{time}.key": f"{attention}.key",
        f"{time}.value": f"{attention}.value",
        f"{time}.receptance": f"{attention}.receptance",
        f"{time}.w": From(f"{attention}.time_decay", lambda t: -t.float().exp()),
        f"{time}.first": f"{attention}.time_first",
        f"{time}.out": f"{attention}.output",
        f"{channel}.shift.conv.weight": tuple(taps(f"{feed_forward}.time_mix_{n}") for n in ("key", "receptance")),
        f"{channel}.up": f"{feed_forward}.key",
        f"{channel}.receptance": f"{feed_forward}.receptance",
        f"{channel}.down": f"{feed_forward}.value",
    }
