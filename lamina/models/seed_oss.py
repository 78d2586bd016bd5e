"""Seed-OSS: Llama with biases on q, k and v.

https://github.com/ByteDance-Seed/seed-oss
"""

from __future__ import annotations

from typing import Any

from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import SelfAttention


class SeedOss(Transformer):
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True}

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, **dict(out_bias=c.get("attention_out_bias", False)) | options)
