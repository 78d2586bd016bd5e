"""`Stored`: keys or values that are still in the store, in place of a dense tensor.

`update` must return tensors. Where the store holds something else (codes, pages, bytes on the host), a dense copy of
the whole history would be made for every token. A `Stored` has the shape, dtype and device of that copy, and our
attention function reads it block by block. Any other operation on it gets the dense copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lamina.bridge.layers.in_order import first_seen, joined, runs
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.step import Step
from lamina.cache.storage.device import Storage


def is_dense(layer: TokenLayer) -> bool:
    """True if the layer stores keys as attention reads them."""
    return not layer.coding.formats and type(layer.storage) is Storage


class Tokens:
    """The tokens that queries at positions start … start + T - 1 may see, in the store of one entry."""

    def __init__(self, layer: TokenLayer, step: Step, start: int, new: Fields) -> None:
        self.layer, self.step, self.end = layer, step, start + step.T
        self.first = first_seen(layer.window.span, start)
        ring = layer.layout.ring is not None
        self.stored = start if ring and step.T > 1 else self.end  # a ring stores several tokens only at commit
        self.new = new

    def parts(self, first: int, end: int) -> Fields:
        """Parts [B, *lead, N, width] of positions first … end - 1."""
        pieces = runs(self.layer, self.step, first, min(end, self.stored))
        if end > self.stored:
            behind = max(0, first - self.stored)
            pieces.append({name: x[..., behind : end - self.stored, :] for name, x in self.new.items()})
        return joined(pieces)

    def blocks(self, size: int) -> Iterator[tuple[int, Fields]]:
        """Blocks of up to `size` tokens: (index of its first token among those seen, fields)."""
        for at in range(self.first, self.end, size):
            yield at - self.first, self.layer.coding.decode(self.parts(at, min(at + size, self.end)))

    def dense(self) -> Fields:
        return self.layer.coding.decode(self.parts(self.first, self.end))


class Stored(torch.Tensor):
    """One field of `Tokens`, [B, *lead, N, D]."""

    tokens: Tokens
    field: str

    @staticmethod
    def of(tokens: Tokens, name: str, like: Tensor) -> Stored:
        """like: the new tokens of this field, as the model gave them [B, *lead, T, D]"""
        shape = (*like.shape[:-2], tokens.end - tokens.first, like.shape[-1])
        made: Stored = torch.Tensor._make_wrapper_subclass(Stored, shape, dtype=like.dtype, device=like.device)
        made.tokens, made.field = tokens, name
        return made

    def dense(self) -> Tensor:
        """The copy that this stands for."""
        return self.tokens.dense()[self.field].contiguous()  # as the strides of this tensor say

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Stored({self.field}, {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, Stored) else x, (args, kwargs or {}))
        return func(*args, **kwargs)
