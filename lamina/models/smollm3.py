"""SmolLM3: Llama in which every fourth layer has no RoPE (NoPE), and may have a sliding window.

https://huggingface.co/blog/smollm3
"""

from __future__ import annotations

from typing import Any

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import layer_types
from lamina.models.transformer import Transformer
from lamina.nn import SelfAttention


class SmolLM3(Transformer):
    defaults = {"num_key_value_heads": 4}
    tied = True
    rope_base = 2_000_000.0

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        rope = "default" if rotated(c)[layer] else None
        return super().make_attention(c, layer, **dict(rope=rope) | options)

    def make_window(self, c: Config, layer: int) -> Window:
        c.ignore("max_window_layers")  # in published files; no code reads it
        size, used = c.get("sliding_window"), c.get("use_sliding_window", False)

        def otherwise(i: int) -> str:
            return "sliding_attention" if used and size is not None and not rotated(c)[i] else "full_attention"

        kind = layer_types(c, ["full_attention", "sliding_attention"], otherwise)[layer]
        return Full() if kind == "full_attention" else Sliding(c.sliding_window)


def rotated(c: Config) -> list[bool]:
    """Which layers have RoPE. `no_rope_layers` has a 1 for those, despite its name."""
    every, count = c.get("no_rope_layer_interval", 4), c.num_hidden_layers
    flags = c.get("no_rope_layers", [(i + 1) % every != 0 for i in range(count)])
    if len(flags) < count:
        raise InputError(f"no_rope_layers={flags} must have an entry for each of {count} layers")
    return [bool(flag) for flag in flags]
