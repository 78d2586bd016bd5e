"""MiMo-V2-Flash: sliding attention with learned sinks, every sixth layer full, and the mixtures of DeepSeek V3.

Sliding layers have twice as many key heads. Values are narrower than keys.

https://arxiv.org/abs/2601.02780
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lamina.attention.window import Full, Sliding, Window
from lamina.checkpoint.names import Either
from lamina.config import Config
from lamina.models.decoder import layer_types
from lamina.models.deepseek import balanced_mixture, mixture_names
from lamina.models.transformer import Transformer
from lamina.nn import Rotary, SelfAttention

KINDS = ["full_attention", "sliding_attention"]
BASES = {"full_attention": 5_000_000.0, "sliding_attention": 10_000.0}


class MiMoV2Flash(Transformer):
    names = Transformer.names | {
        **mixture_names("blocks.{i}.mlp", "model.layers.{i}.mlp"),
        "blocks.{i}.attention.sinks": Either(
            "model.layers.{i}.self_attn.attention_sink_bias", "model.layers.{i}.self_attn.sinks"
        ),
    }
    ignored: tuple[str, ...] = ("model.mtp.*",)  # multi-token prediction
    aliases = {"n_routed_experts": "num_local_experts"}
    defaults = {"head_dim": 192, "v_head_dim": 128}
    eps = ("rms_norm_eps", 1e-5)

    def kind(self, c: Config, layer: int) -> str:
        return layer_types(c, KINDS, lambda i: KINDS[i > 0 and (i + 1) % 6 > 0])[layer]

    def make_window(self, c: Config, layer: int) -> Window:
        size = c.get("sliding_window_size")
        return (
            Full() if self.kind(c, layer) == KINDS[0] else Sliding(size + 1 if size else c.get("sliding_window", 129))
        )

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        kind = self.kind(c, layer)
        sliding = kind == KINDS[1]
        scale = c.said("attention_value_scale", 0.707)
        return super().make_attention(
            c.with_values(num_key_value_heads=c.num_key_value_heads * (2 if sliding else 1)), layer,
            value_dim=c.v_head_dim, out_bias=False, rope=kind, sinks=sliding,
            factors=(1.0, 1.0 if scale is None else scale), **options,
        )  # fmt: skip

    def make_rope(self, c: Config) -> Mapping[str, Rotary]:
        return {kind: Rotary.of(c, c.head_width, BASES[kind], partial=0.334, kind=kind) for kind in KINDS}

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        kinds = c.get("mlp_layer_types")
        dense = kinds[layer] == "dense" if kinds else layer == 0
        return super().make_mlp(c, layer) if dense else balanced_mixture(c.with_values(n_shared_experts=0))
