"""Windows: which earlier tokens stay visible to a query, as a rule over positions.

A window is a frozen dataclass, so it can be compared, hashed and printed. It says nothing about causality, padding or
where tokens are stored: `View` adds the first two, the cache the third.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.errors import InputError


class Window(ABC):
    """Which tokens stay visible. To add a kind, subclass this as a frozen dataclass with `sees` and `span`."""

    @abstractmethod
    def sees(self, q: Tensor, kv: Tensor) -> Tensor:
        """True where a query at position `q` may see a key at `kv`, elementwise. Causality is not included."""

    @property
    @abstractmethod
    def span(self) -> int | None:
        """A query sees at most this many of the newest tokens, its own included (kept ones not counted). None: all."""

    def spares(self, slots: int) -> bool:
        """True if, among any `slots` consecutive positions, each sees itself and all earlier ones: no mask needed."""
        return slots <= 1


@dataclass(frozen=True)
class Full(Window):
    """Every token stays visible."""

    def sees(self, q: Tensor, kv: Tensor) -> Tensor:
        return torch.ones_like(q - kv, dtype=torch.bool)

    @property
    def span(self) -> int | None:
        return None

    def spares(self, slots: int) -> bool:
        return True


@dataclass(frozen=True)
class Sliding(Window):
    """The last `size` tokens stay visible, and the first `keep` ones (attention sinks).

    >>> import torch
    >>> Sliding(2, keep=1).sees(torch.tensor(5), torch.arange(6)).tolist()
    [True, False, False, False, True, True]
    """

    size: int
    keep: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"Sliding(size={self.size}): size is at least 1, the query's own token")
        if self.keep < 0:
            raise InputError(f"Sliding(keep={self.keep}): keep counts first tokens and is at least 0")

    def sees(self, q: Tensor, kv: Tensor) -> Tensor:
        near = kv > q - self.size
        return near | (kv < self.keep) if self.keep else near

    @property
    def span(self) -> int | None:
        return self.size

    def spares(self, slots: int) -> bool:
        return slots <= self.size


@dataclass(frozen=True)
class Near(Window):
    """The tokens at most `size` before or after a query stay visible, for attention in both directions.

    >>> import torch
    >>> Near(2).sees(torch.tensor(3), torch.arange(7)).tolist()
    [False, True, True, True, True, True, False]
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise InputError(f"Near(size={self.size}): size is at least 0, the query's own token alone")

    def sees(self, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv).abs() <= self.size

    @property
    def span(self) -> int | None:
        return None

    def spares(self, slots: int) -> bool:
        return slots <= self.size + 1


@dataclass(frozen=True)
class Chunked(Window):
    """Positions are divided into chunks of `size`; a query sees its own chunk.

    >>> import torch
    >>> Chunked(4).sees(torch.tensor(5), torch.arange(6)).tolist()
    [False, False, False, False, True, True]
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"Chunked(size={self.size}): size is at least 1")

    def sees(self, q: Tensor, kv: Tensor) -> Tensor:
        return q // self.size == kv // self.size

    @property
    def span(self) -> int | None:
        return self.size
