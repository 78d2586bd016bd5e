"""Specs of what a transformers model stores. Each has a dtype of its own, since layers of one model may differ in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lamina.attention.window import Full, Sliding, Window
from lamina.cache import spec
from lamina.cache.layers.attention import AttentionLayer

if TYPE_CHECKING:
    from lamina.cache.layers.base import Layer
    from lamina.cache.spec import Keeping


def window_of(size: int | None) -> Window:
    """The window of attention over the last `size` tokens; over all tokens if None. Chunks need no more than that."""
    return Full() if size is None else Sliding(size)


@dataclass(frozen=True)
class Attention(spec.Attention):
    """Keys [B, kv_heads, T, key_dim] and values [B, value_heads, T, value_dim] of one layer."""

    value_heads: int = 1
    dtype: torch.dtype = torch.float32

    def layer(self, keeping: Keeping | None) -> Layer:
        fields = {"k": (self.kv_heads, self.key_dim), "v": (self.value_heads, self.value_dim)}
        own = None if keeping is None else replace(keeping, dtype=self.dtype)
        return AttentionLayer(self, fields, self.window, own)
