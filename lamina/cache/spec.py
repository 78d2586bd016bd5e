"""What a model's layers must remember. The model publishes specs; how they are stored is the user's choice.

A spec is a frozen description of one thing that one layer carries from token to token. A layer of a model has a mapping
name -> spec: one entry for ordinary attention, two or three for a layer that is recurrent and attends, none for a layer
that remembers nothing.

A new kind, also one outside this package, is a `Spec` whose `layer` makes its `Layer`, and which names the memory calls
that it answers to. Model code calls it with `memory.call("name", …)`. Kernels for captured decoding are optional:
`lamina.register_kernels`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from lamina.attention.window import Full, Window
from lamina.cache.codec.codec import Codec
from lamina.cache.layers.attention import (
    AttentionLayer,
    IndexLayer,
    LatentLayer,
    SharedIndexLayer,
    SharedLayer,
    TokensLayer,
)
from lamina.cache.layers.cross import CrossLayer
from lamina.cache.layers.recurrent import ConvolutionLayer, RecurrentLayer
from lamina.errors import InputError
from lamina.recurrence.rule import Rule

if TYPE_CHECKING:
    from lamina.cache.layers.base import Key, Layer


@dataclass(frozen=True)
class Keeping:
    """How the user wants a cache stored: rows, room and slack, dtype and device, codec, and residence."""

    rows: int
    capacity: int | None
    slack: int
    dtype: torch.dtype
    device: torch.device
    codec: Codec = field(default_factory=Codec)
    key_mean: Tensor | None = None  # [H, 1, D] subtracted from keys before they are quantized
    residence: str = "device"  # or "host", for kinds that can be stored there


class Spec(ABC):
    """One thing a layer remembers."""

    calls: ClassVar[tuple[str, ...]] = ()
    """The memory calls that it answers to, such as "attend"."""

    takes_codec: ClassVar[bool] = False
    """True if a codec quantizes any of it."""

    uses_positions: ClassVar[bool] = True
    """False if it works at any length: the model's trained context does not bound it."""

    reads_source: ClassVar[bool] = False
    """True if it stores what an encoder made of a source."""

    twins: ClassVar[bool] = False
    """True if layers of equal specs begin as copies of one (`Layer.twin`). Not inherited: the layer of a subclass may
    keep more than its stores, and its fields may be ones that cannot be compared."""

    @property
    def reads_from(self) -> Key | None:
        """The entry of another layer whose keys and values it reads in the same pass, if it has none of its own."""
        return None

    @abstractmethod
    def layer(self, keeping: Keeping | None) -> Layer:
        """The layer that stores it; with `keeping=None` one that stores nothing, for a pass without a cache."""


@dataclass(frozen=True)
class Attention(Spec):
    """Keys and values of attention, of which `window` stays visible."""

    calls = ("attend",)
    takes_codec = twins = True
    kv_heads: int
    key_dim: int
    value_dim: int
    window: Window = field(default_factory=Full)

    def layer(self, keeping: Keeping | None) -> Layer:
        fields = {"k": (self.kv_heads, self.key_dim), "v": (self.kv_heads, self.value_dim)}
        return AttentionLayer(self, fields, self.window, keeping)


@dataclass(frozen=True)
class Latent(Spec):
    """Multi-head latent attention: one latent of `rank` values and one rotary key per token, shared by all heads."""

    calls = ("attend_latent",)
    takes_codec = twins = True
    rank: int
    rope_dim: int
    window: Window = field(default_factory=Full)

    def layer(self, keeping: Keeping | None) -> Layer:
        return LatentLayer(self, {"latent": (self.rank + self.rope_dim,)}, self.window, keeping)


@dataclass(frozen=True)
class Tokens(Spec):
    """One vector per token that is read back as it is, such as the keys of an indexer."""

    calls = ("recall",)
    takes_codec = twins = True
    dim: int
    window: Window = field(default_factory=Full)

    def layer(self, keeping: Keeping | None) -> Layer:
        return TokensLayer(self, {"x": (self.dim,)}, self.window, keeping)


@dataclass(frozen=True)
class IndexKeys(Tokens):
    """The keys of an indexer, one per token, by which `top` tokens are selected for each query.

    The entry of the attention that the selection is for has the same window, so both have a token in the same slot.
    """

    calls = ("select",)
    twins = True
    top: int = 2048

    def __post_init__(self) -> None:
        if self.window != Full() or self.top < 1:
            raise InputError(f"{self}: an indexer selects at least one of all tokens, window Full()")

    def layer(self, keeping: Keeping | None) -> Layer:
        return IndexLayer(self, {"x": (self.dim,)}, self.window, keeping)


@dataclass(frozen=True)
class Convolution(Spec):
    """The last inputs of a causal depthwise convolution."""

    calls = ("convolve",)
    uses_positions = False
    channels: int
    kernel: int

    def layer(self, keeping: Keeping | None) -> Layer:
        return ConvolutionLayer(self, keeping)


@dataclass(frozen=True)
class Recurrent(Spec):
    """The state of a recurrence. The rule tells the state's shape and what the recurrence reads of each token."""

    calls = ("recur", "mix")
    uses_positions = False
    rule: Rule

    def layer(self, keeping: Keeping | None) -> Layer:
        return RecurrentLayer(self, keeping)


@dataclass(frozen=True)
class Cross(Spec):
    """Keys and values of an encoder's output: written once, when a source is attached."""

    calls = ("attend",)
    takes_codec = True
    uses_positions = False
    reads_source = True
    kv_heads: int
    key_dim: int
    value_dim: int

    def layer(self, keeping: Keeping | None) -> Layer:
        return CrossLayer(self, keeping)


@dataclass(frozen=True)
class Shared(Spec):
    """Nothing of its own: reads the keys and values that an earlier layer wrote in the same pass."""

    calls = ("attend",)
    source: int
    name: str = "attention"

    @property
    def reads_from(self) -> Key:
        return self.source, self.name

    def layer(self, keeping: Keeping | None) -> Layer:
        return SharedLayer(self)


@dataclass(frozen=True)
class SharedIndex(Spec):
    """Nothing of its own: reads the selection that an earlier layer's `IndexKeys` made in the same pass."""

    calls = ("select",)
    source: int
    name: str = "index"

    @property
    def reads_from(self) -> Key:
        return self.source, self.name

    def layer(self, keeping: Keeping | None) -> Layer:
        return SharedIndexLayer(self)


LayerSpecs = Mapping[str, Spec]


def is_model(given: object) -> bool:
    """True for a model: a class whose `specs` say what each of its layers remembers."""
    return isinstance(getattr(type(given), "specs", None), property)


def specs_of(index: int, block: nn.Module) -> LayerSpecs:
    """What a block must remember: name -> spec."""
    made = getattr(type(block), "specs", None)
    if isinstance(made, property):  # called directly, since nn.Module would hide an AttributeError inside it
        return made.__get__(block)
    if made is None and "specs" not in block.__dict__:
        raise InputError(
            f"block {index} ({type(block).__name__}) does not say what its cache stores: give it specs, such as "
            '{"attention": lamina.Attention(kv_heads, key_dim, value_dim)}, or {} for nothing'
        )
    return block.specs  # type: ignore[return-value]
