"""Llama: x + attention(norm(x)), then x + mlp(norm(x)); RoPE, grouped heads, gated MLP.

https://arxiv.org/abs/2302.13971
"""

from __future__ import annotations

from lamina.models.transformer import Transformer


class Llama(Transformer):
    """`Transformer` as it is."""
