"""Mamba: x + mixer(norm(x)) and nothing else; the mixer is a selective scan between two projections.

Falcon Mamba is the same with norms, without weights, of what the input selects: step sizes, B and C.

https://arxiv.org/abs/2312.00752  https://arxiv.org/abs/2410.05355
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.checkpoint.names import Either
from lamina.config import Config
from lamina.models.decoder import Decoder
from lamina.nn import Mamba2Mixer, MambaMixer, Positions, RMSNorm, mamba_names


class MambaBlock(nn.Module):
    def __init__(self, c: Config, mixer: MambaMixer | Mamba2Mixer) -> None:
        super().__init__()
        self.norm = RMSNorm(c.hidden_size, c.get("layer_norm_epsilon", 1e-5))
        self.mixer = mixer
        self.float_residual = c.get("residual_in_fp32", True)
        self.specs = mixer.specs

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        if self.float_residual:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.mixer(self.norm(x, self.mixer.conv.weight.dtype), memory, shared, onto=x)


class Mamba(Decoder):
    no_effect: tuple[str, ...] = (
        "time_step_min", "time_step_max",  # of initial weights
        "d_inner", "d_model", "n_layer", "ssm_cfg", "ssm_cfg.*",  # older names, beside the newer
    )  # fmt: skip
    names = {
        "embedding": Either("backbone.embeddings", "backbone.embedding"),
        "blocks.{i}.norm": "backbone.layers.{i}.norm",
        **mamba_names("blocks.{i}.mixer", "backbone.layers.{i}.mixer"),
        "norm": "backbone.norm_f",
        "head": "lm_head",
    }
    tied = True
    """Default of `tie_word_embeddings`."""

    def __init__(self, c: Config) -> None:
        c.require("rms_norm", (True,), True)
        super().__init__(
            c,
            (MambaBlock(c, self.mixer(c)) for _ in range(c.num_hidden_layers)),
            RMSNorm(c.hidden_size, c.get("layer_norm_epsilon", 1e-5)),
            rope=None,
            tied=c.get("tie_word_embeddings", self.tied),
        )

    @classmethod
    def mixer(cls, c: Config) -> MambaMixer | Mamba2Mixer:
        rank, state = c.get("time_step_rank", "auto"), c.get("state_size", 16)
        rank = math.ceil(c.hidden_size / 16) if rank == "auto" else rank
        inner = c.get("intermediate_size", int(c.get("expand", 2) * c.hidden_size))
        return MambaMixer(
            c.hidden_size, inner, state, rank, c.get("conv_kernel", 4),
            act=c.get("hidden_act", "silu"), bias=c.get("use_bias", False), conv_bias=c.get("use_conv_bias", True),
            norms=cls.norms(c, rank, state),
        )  # fmt: skip

    @staticmethod
    def norms(c: Config, rank: int, state: int) -> tuple[RMSNorm, RMSNorm, RMSNorm] | None:
        """Norms of dt, B and C."""
        return None

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x, self.embedding.weight.dtype))


class FalconMamba(Mamba):
    @staticmethod
    def norms(c: Config, rank: int, state: int) -> tuple[RMSNorm, RMSNorm, RMSNorm] | None:
        eps = c.get("mixer_rms_eps", 1e-6)
        return RMSNorm(rank, eps, weight=False), RMSNorm(state, eps, weight=False), RMSNorm(state, eps, weight=False)
