"""GLM-4, ERNIE 4.5 and Helium: Llama whose RoPE pairs neighbouring dimensions; GLM rotates half of each head.

https://arxiv.org/abs/2406.12793  https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf
https://kyutai.org/2025/01/13/helium.html
"""

from __future__ import annotations

from typing import Any

from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import SelfAttention


class Helium(Transformer):
    eps = ("rms_norm_eps", 1e-8)
    rope_base = 100_000.0
    defaults = {"head_dim": 128, "num_key_value_heads": 20}

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(neighbours=True, out_bias=False) | options)


class Ernie4_5(Transformer):
    aliases = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
    defaults = {"head_dim": 128, "num_key_value_heads": 2}
    tied = True
    eps = ("rms_norm_eps", 1e-5)
    rope_base = 500_000.0

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(neighbours=True) | options)


class Glm(Helium):
    """The first GLM-4."""

    names = Transformer.names | {"blocks.{i}.mlp.gate_up": "model.layers.{i}.mlp.gate_up_proj"}
    defaults = {"head_dim": 128, "num_key_value_heads": 2, "attention_bias": True}
    eps = ("rms_norm_eps", 1.5625e-7)
    rope_base = 10_000.0
    rope_partial = 0.5

    def __init__(self, c: Config) -> None:
        super().__init__(c.with_values(mlp_bias=False))


class Glm4(Glm):
    """GLM-4 of April 2025: norms also after attention and MLP."""

    names = Glm.names | {
        "blocks.{i}.attention_post_norm": "model.layers.{i}.post_self_attn_layernorm",
        "blocks.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        "blocks.{i}.mlp_post_norm": "model.layers.{i}.post_mlp_layernorm",
    }
    order = "both"
