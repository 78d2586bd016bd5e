"""GLM-4.5, dots.llm1, Solar Open and K-EXAONE: grouped-query attention with the mixtures of DeepSeek V3.

https://arxiv.org/abs/2508.06471  https://arxiv.org/abs/2506.05767  https://arxiv.org/abs/2601.01739
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lamina.attention.window import Full, Sliding, Window
from lamina.checkpoint.names import Either
from lamina.config import Config
from lamina.models.decoder import layer_types
from lamina.models.deepseek import balanced_mixture, mixture_names, prediction_layers
from lamina.models.exaone4 import Exaone4
from lamina.models.transformer import Transformer
from lamina.nn import RMSNorm, SelfAttention


class Glm4Moe(Transformer):
    names = Transformer.names | mixture_names("blocks.{i}.mlp", "model.layers.{i}.mlp")
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = {"n_shared_experts": 1}
    eps = ("rms_norm_eps", 1e-5)
    rope_partial = 0.5

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.ignored = (*self.ignored, *prediction_layers(c))

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        if c.get("use_qk_norm", False):
            q_norm, k_norm = (RMSNorm(c.head_width, c.get(*self.eps)) for _ in range(2))
            options = dict(q_norm=q_norm, k_norm=k_norm) | options
        return super().make_attention(c, layer, **dict(out_bias=False) | options)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return super().make_mlp(c, layer) if layer < c.get("first_k_dense_replace", 1) else balanced_mixture(c)


class Dots1(Transformer):
    names = Glm4Moe.names
    aliases = Glm4Moe.aliases
    no_effect = ("use_sliding_window",)  # which transformers does not read

    def __init__(self, c: Config) -> None:
        c.require("scoring_func", ("sigmoid", "noaux_tc"), "sigmoid")  # in published files; both mean sigmoids here
        c.require("moe_layer_freq", (1,), 1)
        super().__init__(c)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        q_norm, k_norm = (RMSNorm(c.head_width, c.get(*self.eps)) for _ in range(2))
        return super().make_attention(c, layer, q_norm=q_norm, k_norm=k_norm, **options)

    def make_window(self, c: Config, layer: int) -> Window:
        """Without `layer_types`, layers from `max_window_layers` on have a window."""
        size, first = c.said("sliding_window", 4096), c.get("max_window_layers", 62)
        kinds = ["full_attention", "sliding_attention"]
        found = layer_types(c, kinds, lambda i: kinds[size is not None and i >= first])
        return Full() if found[layer] == kinds[0] or size is None else Sliding(size)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        if layer < c.get("first_k_dense_replace", 0):
            return super().make_mlp(c, layer)
        return balanced_mixture(c.with_values(norm_topk_prob=c.get("norm_topk_prob", False)))


class SolarOpen(Glm4Moe):
    defaults = {**Glm4Moe.defaults, "head_dim": 128, "first_k_dense_replace": 0}
    rope_base = 1_000_000.0
    rope_partial = 1.0


class ExaoneMoe(Exaone4):
    """Layers of K-EXAONE have the norms of Llama, not those of EXAONE 4."""

    names = Glm4Moe.names | {
        "blocks.{i}.mlp.router.bias": Either(
            "model.layers.{i}.mlp.e_score_correction_bias", "model.layers.{i}.mlp.gate.e_score_correction_bias"
        )
    }
    aliases = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    defaults = {**Exaone4.defaults, "n_shared_experts": 1}
    order = "pre"

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        kinds = c.get("mlp_layer_types")
        dense = kinds[layer] == "dense" if kinds else layer < c.get("first_k_dense_replace", 1)
        if dense:
            return super().make_mlp(c, layer)
        return balanced_mixture(c.with_values(routed_scaling_factor=c.get("routed_scaling_factor", 2.5)))
