"""Qwen 2 and 3: Llama with biases on q, k and v (Qwen 2), or with norms of queries and keys instead (Qwen 3).

https://arxiv.org/abs/2407.10671  https://arxiv.org/abs/2505.09388
"""

from __future__ import annotations

from typing import Any

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import layer_types
from lamina.models.transformer import Transformer
from lamina.nn import RMSNorm, SelfAttention


class Qwen2(Transformer):
    no_effect: tuple[str, ...] = ("sliding_window", "max_window_layers")

    def __init__(self, c: Config) -> None:
        c.require("use_mrope", (False,), False)
        super().__init__(c)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(bias=True, out_bias=False) | options)

    def make_window(self, c: Config, layer: int) -> Window:
        """Where windows are used at all, the first `max_window_layers` layers have none."""
        first = c.get("max_window_layers", 28) if c.get("use_sliding_window", False) else c.num_hidden_layers
        kinds = layer_types(
            c, ["full_attention", "sliding_attention"], lambda i: "full_attention" if i < first else "sliding_attention"
        )
        return window_if_used(c, kinds[layer])


def window_if_used(c: Config, kind: str) -> Window:
    """The window of a layer of this kind; sliding layers need `use_sliding_window`."""
    if kind == "full_attention":
        return Full()
    if not c.get("use_sliding_window", False):
        raise InputError(
            f"layer_types={c.layer_types} in the configuration has sliding layers, and use_sliding_window=False"
        )
    return Sliding(c.get("sliding_window", 4096))


class Qwen3(Qwen2):
    defaults = {"head_dim": 128}

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        bias = c.get("attention_bias", False)
        q_norm, k_norm = (RMSNorm(c.head_width, c.get(*self.eps)) for _ in range(2))
        return super().make_attention(c, layer, bias=bias, out_bias=bias, q_norm=q_norm, k_norm=k_norm, **options)
