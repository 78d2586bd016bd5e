"""Llama: x + attention(norm(x)), then x + mlp(norm(x)); RoPE, grouped heads, gated MLP.

https://arxiv.org/abs/2302.13971
"""

from __future__ import annotations

from lamina.config import Config
from lamina.models.transformer import Transformer


class Llama(Transformer):
    """`Transformer` as it is."""

    no_effect = ("is_llama_config",)

    def __init__(self, c: Config) -> None:
        c.require("rope_interleaved", (False,), False)  # in SmolLM2; transformers reads neither
        super().__init__(c)
