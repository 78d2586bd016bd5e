"""EXAONE 4: norms after attention and MLP, and norms of queries and keys; layers that attend to a window have RoPE,
those that attend to all tokens have none, unless all do.

https://arxiv.org/abs/2507.11407
"""

from __future__ import annotations

from typing import Any

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.models.decoder import layer_types
from lamina.models.olmo import Olmo2
from lamina.nn import RMSNorm, SelfAttention


class Exaone4(Olmo2):
    no_effect = ("sliding_window_pattern",)
    defaults = {"sliding_window": 4096, "sliding_window_pattern": 4}

    def __init__(self, c: Config) -> None:
        c.ignore("sliding_window_pattern")  # not used beside `layer_types`
        super().__init__(c)

    def make_window(self, c: Config, layer: int) -> Window:
        kind = layer_types(c, ["full_attention", "sliding_attention"], lambda i: kind_of(c, i))[layer]
        return Full() if kind == "full_attention" else Sliding(c.sliding_window)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        everywhere = c.get("sliding_window") is None
        rope = "default" if everywhere or self.make_window(c, layer) != Full() else None
        q_norm, k_norm = (RMSNorm(c.head_width, c.get(*self.eps)) for _ in range(2))
        return super().make_attention(c, layer, rope=rope, q_norm=q_norm, k_norm=k_norm, **options)


def kind_of(c: Config, layer: int) -> str:
    """The kind of a layer where `layer_types` is absent: every n-th is a full one, or a text such as "LLLG"."""
    pattern = c.get("sliding_window_pattern")
    if c.get("sliding_window") is None or not pattern:
        return "full_attention"
    if isinstance(pattern, str):
        full = pattern[layer % len(pattern)] == "G" or layer == c.num_hidden_layers - 1
    else:
        full = (layer + 1) % pattern == 0
    return "full_attention" if full else "sliding_attention"
