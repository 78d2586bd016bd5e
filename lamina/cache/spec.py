"""What a model's layers must remember. The model publishes specs; how they are kept is the user's choice.

A spec is a frozen description of one thing that one layer carries from token to token. A layer of a model has a mapping
name -> spec: one entry for ordinary attention, two or three for a layer that is recurrent and attends, none for a layer
that remembers nothing. A new kind from outside the package is a `Spec` of its own whose `layer` makes its own `Layer`;
model code reaches it with `memory[name].layer`, and every verb and law applies to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lamina.attention.window import Full, Window
from lamina.cache.codec.codec import Codec
from lamina.recurrence.rule import Rule

if TYPE_CHECKING:
    from lamina.cache.layers.base import Layer


@dataclass(frozen=True)
class Keeping:
    """How the user wants a cache kept: rows, room and slack, number format and device, codec, and where bytes live."""

    rows: int
    capacity: int | None
    slack: int
    dtype: torch.dtype
    device: torch.device
    codec: Codec = field(default_factory=Codec)
    key_mean: Tensor | None = None  # [H, 1, D] subtracted from keys before they are quantized
    residence: str = "device"  # or "host", for kinds that can live there


class Spec(ABC):
    """One thing a layer remembers."""

    takes_codec: ClassVar[bool] = False
    """Whether a codec writes any of it."""

    @abstractmethod
    def layer(self, keeping: Keeping | None) -> Layer:
        """The store for it; with `keeping=None` one that holds nothing, for a pass without a cache."""


@dataclass(frozen=True)
class Attention(Spec):
    """Keys and values of attention, of which `window` stays visible."""

    takes_codec = True
    kv_heads: int
    key_dim: int
    value_dim: int
    window: Window = field(default_factory=Full)

    def layer(self, keeping: Keeping | None) -> Layer:
        from lamina.cache.layers.attention import AttentionLayer

        fields = {"k": (self.kv_heads, self.key_dim), "v": (self.kv_heads, self.value_dim)}
        return AttentionLayer(self, fields, self.window, keeping)


@dataclass(frozen=True)
class Latent(Spec):
    """Multi-head latent attention: one latent of `rank` numbers and one rotary key a token, shared by all heads."""

    takes_codec = True
    rank: int
    rope_dim: int
    window: Window = field(default_factory=Full)

    def layer(self, keeping: Keeping | None) -> Layer:
        from lamina.cache.layers.attention import LatentLayer

        return LatentLayer(self, {"latent": (self.rank + self.rope_dim,)}, self.window, keeping)


@dataclass(frozen=True)
class Tokens(Spec):
    """One vector a token that is read back as it is, such as the keys of an indexer."""

    takes_codec = True
    dim: int
    window: Window = field(default_factory=Full)

    def layer(self, keeping: Keeping | None) -> Layer:
        from lamina.cache.layers.attention import TokensLayer

        return TokensLayer(self, {"x": (self.dim,)}, self.window, keeping)


@dataclass(frozen=True)
class Convolution(Spec):
    """The last inputs of a causal depthwise convolution."""

    channels: int
    kernel: int

    def layer(self, keeping: Keeping | None) -> Layer:
        from lamina.cache.layers.recurrent import ConvolutionLayer

        return ConvolutionLayer(self, keeping)


@dataclass(frozen=True)
class Recurrent(Spec):
    """The state of a recurrence. The rule tells the state's shape and what the recurrence reads of each token."""

    rule: Rule

    def layer(self, keeping: Keeping | None) -> Layer:
        from lamina.cache.layers.recurrent import RecurrentLayer

        return RecurrentLayer(self, keeping)


@dataclass(frozen=True)
class Cross(Spec):
    """Keys and values of an encoder's output: written once, when a source is attached."""

    takes_codec = True
    kv_heads: int
    key_dim: int
    value_dim: int

    def layer(self, keeping: Keeping | None) -> Layer:
        from lamina.cache.layers.cross import CrossLayer

        return CrossLayer(self, keeping)


@dataclass(frozen=True)
class Shared(Spec):
    """Nothing of its own: reads the keys and values that an earlier layer wrote in the same pass."""

    source: int
    name: str = "attention"

    def layer(self, keeping: Keeping | None) -> Layer:
        from lamina.cache.layers.attention import SharedLayer

        return SharedLayer(self)


LayerSpecs = Mapping[str, Spec]


def is_model(given: object) -> bool:
    """True for a model: a class whose `specs` say what each of its layers remembers."""
    return isinstance(getattr(type(given), "specs", None), property)
