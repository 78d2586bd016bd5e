"""Mamba-2: Mamba with one decay per head, not per channel and state entry, so prefill is matrix products.

https://arxiv.org/abs/2405.21060
"""

from __future__ import annotations

import math

from lamina.checkpoint.names import Either
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.mamba import Mamba
from lamina.nn import GatedRMSNorm, Mamba2Mixer, mamba2_names


class Mamba2(Mamba):
    no_effect: tuple[str, ...] = (
        "time_step_min", "time_step_max", "time_step_rank",  # of initial weights
        "intermediate_size",
        "norm_before_gate",  # true in Mamba-Codestral, which no code reads: the gate comes before the norm
    )  # fmt: skip
    names = {
        "embedding": Either("backbone.embeddings", "backbone.embedding"),
        "blocks.{i}.norm": "backbone.layers.{i}.norm",
        **mamba2_names("blocks.{i}.mixer", "backbone.layers.{i}.mixer"),
        "norm": "backbone.norm_f",
        "head": "lm_head",
    }
    tied = False

    @classmethod
    def mixer(cls, c: Config) -> Mamba2Mixer:
        inner, expanded, bias = c.num_heads * c.head_dim, c.get("expand", 2) * c.hidden_size, c.get("use_bias", False)
        if inner != expanded:
            raise InputError(
                f"num_heads {c.num_heads} × head_dim {c.head_dim} in the configuration is {inner}, "
                f"but expand × hidden_size is {expanded}"
            )
        return Mamba2Mixer(
            c.hidden_size, c.num_heads, c.head_dim, c.state_size, c.n_groups, c.conv_kernel,
            act=c.get("hidden_act", "silu"), bias=bias, conv_bias=c.get("use_conv_bias", True), out_bias=bias,
            dt_limit=c.get("time_step_limit", (0.0, math.inf)), norm=GatedRMSNorm(inner, c.layer_norm_epsilon),
        )  # fmt: skip
