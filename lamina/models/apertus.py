"""Apertus: Llama with norms of queries and keys, and an MLP without gate whose activation (xIELU) has learned slopes.

    xIELU(x) = α₊ x² + β x                     x > 0
               α₋ (exp(x) - 1 - x) + β x       otherwise

https://arxiv.org/abs/2509.14233  https://arxiv.org/abs/2411.13010
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import MLP, Linear, RMSNorm, SelfAttention


class XIELU(nn.Module):
    """Parameters as in checkpoints: α₊ = softplus(alpha_p), α₋ = β + softplus(alpha_n); `eps` is just below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.beta, self.eps = (nn.Parameter(torch.zeros(())) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        slope = self.beta + F.softplus(self.alpha_n)
        curved = torch.where(
            x > 0, F.softplus(self.alpha_p) * x * x, (torch.expm1(torch.minimum(x, self.eps)) - x) * slope
        )
        return curved + self.beta * x


class XIELUMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = Linear(width, inner, bias=False), Linear(inner, width, bias=False)
        self.act = XIELU()

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x [..., width] -> [..., width]; `onto`: a residual that the result is added to."""
        return self.down(self.act(self.up(x)), onto)


class Apertus(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention_norm": "model.layers.{i}.attention_layernorm",
        "blocks.{i}.mlp_norm": "model.layers.{i}.feedforward_layernorm",
        "blocks.{i}.mlp.act": "model.layers.{i}.mlp.act_fn",
    }
    eps = ("rms_norm_eps", 1e-5)
    act = ("hidden_act", "xielu")
    rope_base = 12_000_000.0

    @classmethod
    def complete(cls, config: Config) -> Config:
        c = super().complete(config)
        c.require("qk_norm", (True,), True)
        c.require("post_norm", (False,), False)
        c.require("mlp_bias", (False,), False)
        if c.get("rope_parameters") is None and "rope_scaling" not in c.values:  # null: not scaled
            c = c.with_values(rope_parameters=ROPE | {"rope_theta": c.get("rope_theta", ROPE["rope_theta"])})
        return c

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        q_norm, k_norm = (RMSNorm(c.head_width, c.get(*self.eps)) for _ in range(2))
        return super().make_attention(c, layer, q_norm=q_norm, k_norm=k_norm, **options)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        if (act := c.get(*self.act)) == "xielu":
            return XIELUMLP(c.hidden_size, c.intermediate_size)
        return MLP(c.hidden_size, c.intermediate_size, act)


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Settings of a configuration that has none."""
