"""OLMo: Llama with LayerNorms that have no weights.

OLMo 2 has RMS norms after attention and MLP instead of before them, and norms of all queries and all keys together.
In OLMo 3 three of four layers attend to a window, and only the fourth scales its RoPE.

https://arxiv.org/abs/2402.00838  https://arxiv.org/abs/2501.00656  https://arxiv.org/abs/2512.13961
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lamina.attention.window import Full, Window
from lamina.config import Config
from lamina.models.transformer import Order, Transformer, ropes_by_type, window_by_type, with_ropes_by_type
from lamina.nn import LayerNorm, RMSNorm, Rotary, SelfAttention


class Olmo(Transformer):
    def make_norm(self, c: Config) -> LayerNorm:
        return LayerNorm(c.hidden_size, 1e-5, weight=False, bias=False)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, clip=c.get("clip_qkv"), **options)


class Olmo2(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
        "blocks.{i}.mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
    }
    order: ClassVar[Order] = "post"
    eps = ("rms_norm_eps", 1e-5)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        heads = dict(q_norm=c.num_attention_heads, k_norm=c.get("num_key_value_heads", c.num_attention_heads))
        norms = {name: RMSNorm(count * c.head_width, c.get(*self.eps)) for name, count in heads.items()}
        return super().make_attention(c, layer, **norms | options)


class Olmo3(Olmo2):
    @classmethod
    def complete(cls, config: Config) -> Config:
        return with_ropes_by_type(super().complete(config), 500_000.0)

    def make_window(self, c: Config, layer: int) -> Window:
        return window_by_type(c, layer, every=4, default=4096)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        kind = "full_attention" if self.make_window(c, layer) == Full() else "sliding_attention"
        return super().make_attention(c, layer, rope=kind, **options)

    def make_rope(self, c: Config) -> Mapping[str, Rotary]:
        return ropes_by_type(c, c.head_width)
