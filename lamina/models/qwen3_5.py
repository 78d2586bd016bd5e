"""Qwen3.5: Qwen3-Next with one projection for each input of the gated delta rule; dense, or with experts in all layers.

The text part has RoPE as usual: its three sections (time, height, width) have the same positions in text.

https://qwen.ai/blog?id=qwen3.5
"""

from __future__ import annotations

from typing import Any, ClassVar

from lamina.checkpoint.names import Names
from lamina.config import Config
from lamina.models.qwen3_next import Qwen3Next, tensor_names

DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def split_names(c: Config) -> Names:
    """Parameter names: the projections of the delta rule are apart, and contiguous."""
    theirs = "model.layers.{i}.linear_attn"
    parts = tuple(f"{theirs}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    return {**tensor_names(c), "blocks.{i}.delta.project": parts}


class Qwen3_5(Qwen3Next):
    fixed: ClassVar[dict[str, Any]] = {"num_experts": 0}
    """Fields that this family does not have, with the values that Qwen3-Next needs for the same."""
    defaults: ClassVar[dict[str, Any]] = {**DEFAULTS, "num_key_value_heads": 4}

    def __init__(self, c: Config) -> None:
        c = c.with_defaults(self.defaults).with_values(**self.fixed)
        super().__init__(c)
        self.names = split_names(c)


class Qwen3_5Moe(Qwen3_5):
    fixed = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ()}
    defaults = {
        **DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
