"""Specs of what transformers models store. Each has its own dtype, since layers of one model may differ in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from lamina.attention.window import Full, Sliding, Window
from lamina.bridge.layers.states import StateLayer
from lamina.cache import spec
from lamina.cache.layers.attention import AttentionLayer, TokensLayer
from lamina.cache.layers.cross import CrossLayer
from lamina.cache.layers.tokens import TokenLayer

if TYPE_CHECKING:
    from lamina.bridge.layers.kinds import LayerKind
    from lamina.cache.layers.base import Layer
    from lamina.cache.spec import Keeping


def window_of(size: int | None) -> Window:
    """The window of attention over the last `size` tokens; over all tokens if None. Chunks need no more than that."""
    return Full() if size is None else Sliding(size)


def _of(dtype: torch.dtype, keeping: Keeping | None) -> Keeping | None:
    return None if keeping is None else replace(keeping, dtype=dtype)


@dataclass(frozen=True)
class Attention(spec.Attention):
    """Keys [B, kv_heads, T, key_dim] and values [B, value_heads, T, value_dim] of one layer."""

    twins = True
    value_heads: int = 1
    dtype: torch.dtype = torch.float32

    def layer(self, keeping: Keeping | None) -> Layer:
        fields = {"k": (self.kv_heads, self.key_dim), "v": (self.value_heads, self.value_dim)}
        return AttentionLayer(self, fields, self.window, _of(self.dtype, keeping))


@dataclass(frozen=True)
class Cross(spec.Cross):
    """Keys and values of an encoder's output [B, kv_heads, S, key_dim]."""

    dtype: torch.dtype = torch.float32

    def layer(self, keeping: Keeping | None) -> Layer:
        return CrossLayer(self, _of(self.dtype, keeping))


@dataclass(frozen=True)
class Index(spec.Tokens):
    """The keys of an indexer [B, T, dim]."""

    dtype: torch.dtype = torch.float32

    def layer(self, keeping: Keeping | None) -> Layer:
        return TokensLayer(self, {"x": (self.dim,)}, self.window, _of(self.dtype, keeping))


@dataclass(frozen=True)
class Columns(spec.Spec):
    """The last `kernel` inputs of a convolution, which get one column of shape `lead` for each token."""

    uses_positions = False
    lead: tuple[int, ...]
    kernel: int
    dtype: torch.dtype

    def layer(self, keeping: Keeping | None) -> Layer:
        return ColumnsLayer(self, _of(self.dtype, keeping))


class ColumnsLayer(TokenLayer):
    """Inputs [B, S, C] of a convolution in a ring, so that a query at each token finds `kernel` earlier ones."""

    spec: Columns
    pageable = False  # it has a few slots only, and every pass reads them

    def __init__(self, spec: Columns, keeping: Keeping | None) -> None:
        super().__init__(spec, {"x": (prod(spec.lead),)}, Sliding(spec.kernel + 1), keeping)
        if keeping is not None:
            assert self.layout.ring is not None
            self.grows = False
            self.storage.widen(self.data, self.layout.ring)

    @property
    def kind(self) -> str:
        return f"convolution {self.spec.kernel}"


@dataclass(frozen=True)
class State(spec.Spec):
    """A state [B, *shape] that the model computes, kept as it is given."""

    uses_positions = False
    shape: tuple[int, ...]
    dtype: torch.dtype

    def layer(self, keeping: Keeping | None) -> Layer:
        return StateLayer(self, self.shape, _of(self.dtype, keeping))


def stand_in(kind: LayerKind) -> dict[str, spec.Spec]:
    """Specs of a layer of this kind, whose sizes do not matter: they tell whether a codec applies."""
    specs: dict[str, spec.Spec] = {"attention": Attention(1, 1, 1)} if kind.attends else {}
    return specs | ({"state": State((), torch.float32)} if kind.states else {})
