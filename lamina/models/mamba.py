"""Mamba: x + mixer(norm(x)) and nothing else; the mixer is a selective scan between two projections.

    x, z = project(u)        x = act(convolve(x))        dt, B, C from x        out((scan(x, dt, B, C) + D x) · silu(z))

https://arxiv.org/abs/2312.00752
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import Recurrent
from lamina.checkpoint.names import From
from lamina.config import Config
from lamina.models.decoder import Decoder
from lamina.nn import Linear, Mamba2Mixer, RMSNorm, ShortConvolution
from lamina.recurrence import SelectiveScan


class Mixer(nn.Module):
    keep_float32 = ("A", "D", "dt_bias")

    def __init__(self, c: Config) -> None:
        super().__init__()
        inner = int(c.get("expand", 2) * c.hidden_size)
        rank = c.get("time_step_rank", "auto")
        self.rank = math.ceil(c.hidden_size / 16) if rank == "auto" else rank
        self.rule = SelectiveScan(inner, c.state_size)
        self.project = Linear(c.hidden_size, 2 * inner, bias=c.get("use_bias", False))
        act = c.get("hidden_act", "silu")
        self.conv = ShortConvolution(inner, c.conv_kernel, bias=c.get("use_conv_bias", True), act=act)
        self.select = Linear(inner, self.rank + 2 * c.state_size, bias=False)
        self.dt = Linear(self.rank, inner, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(inner))
        self.A = nn.Parameter(torch.full((inner, c.state_size), -1.0))
        self.D = nn.Parameter(torch.ones(inner))
        self.out = Linear(inner, c.hidden_size, bias=c.get("use_bias", False))
        self.specs = {"conv": self.conv.spec, "state": Recurrent(self.rule)}

    def forward(self, u: Tensor, memory: Memory, onto: Tensor | None = None) -> Tensor:
        x, z = self.project(u).chunk(2, dim=-1)  # [B, T, C] each
        x = self.conv(x, memory)
        dt, B, C = self.select(x).split([self.rank, self.rule.state, self.rule.state], dim=-1)
        around = {"dt_bias": self.dt_bias, "skip": self.D, "gate": z}
        y = memory.recur(self.rule, {"x": x, "dt": self.dt(dt), "B": B, "C": C}, {"A": self.A}, around=around)
        return self.out(y, onto)


class Block(nn.Module):
    def __init__(self, c: Config, mixer: Mixer | Mamba2Mixer) -> None:
        super().__init__()
        self.norm = RMSNorm(c.hidden_size, c.layer_norm_epsilon)
        self.mixer = mixer
        self.float_residual = c.get("residual_in_fp32", True)
        self.specs = mixer.specs

    def forward(self, x: Tensor, memory: Memory, shared: None) -> Tensor:
        if self.float_residual:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.mixer(self.norm(x, self.mixer.conv.weight.dtype), memory, onto=x)


class Mamba(Decoder):
    names = {
        "embedding": "backbone.embeddings",
        "blocks.{i}.norm": "backbone.layers.{i}.norm",
        "blocks.{i}.mixer.project": "backbone.layers.{i}.mixer.in_proj",
        "blocks.{i}.mixer.conv": "backbone.layers.{i}.mixer.conv1d",
        "blocks.{i}.mixer.conv.weight": From("backbone.layers.{i}.mixer.conv1d.weight", lambda t: t.squeeze(1)),
        "blocks.{i}.mixer.select": "backbone.layers.{i}.mixer.x_proj",
        "blocks.{i}.mixer.dt": "backbone.layers.{i}.mixer.dt_proj",
        "blocks.{i}.mixer.dt_bias": "backbone.layers.{i}.mixer.dt_proj.bias",
        "blocks.{i}.mixer.A": From("backbone.layers.{i}.mixer.A_log", lambda t: -t.float().exp()),
        "blocks.{i}.mixer.D": "backbone.layers.{i}.mixer.D",
        "blocks.{i}.mixer.out": "backbone.layers.{i}.mixer.out_proj",
        "norm": "backbone.norm_f",
        "head": "lm_head",
    }
    tied = True
    """Default of `tie_word_embeddings`."""

    def __init__(self, c: Config) -> None:
        super().__init__(
            c,
            (Block(c, self.mixer(c)) for _ in range(c.num_hidden_layers)),
            RMSNorm(c.hidden_size, c.layer_norm_epsilon),
            rope=None,
            tied=c.get("tie_word_embeddings", self.tied),
        )

    @staticmethod
    def mixer(c: Config) -> Mixer | Mamba2Mixer:
        return Mixer(c)

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x, self.embedding.weight.dtype))
