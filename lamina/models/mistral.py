"""Mistral: Llama with a sliding window in every layer, if the configuration has one.

https://arxiv.org/abs/2310.06825
"""

from __future__ import annotations

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.models.transformer import Transformer


class Mistral(Transformer):
    def make_window(self, c: Config, layer: int) -> Window:
        size = c.said("sliding_window", 4096)
        return Full() if size is None else Sliding(size)
