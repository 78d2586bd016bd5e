"""Rings whose slots are in the order of positions, so that a window is a view: what `Lines` reads of a sliding layer.

In a ring of R slots the token at position p is in slot p % R. Once the ring is full a window is two runs of slots, and
joining them would copy every token of the window for each new one. Instead the tokens move to a store with some slots
more, in order; the next tokens are stored behind them, until it is full and they move again.

    ring of 4, after 6 tokens    slot 0  1  2  3               position 4  5  2  3
    moved, base 3                slot 0  1  2  3  4  …         position 3  4  5  -  -  …
"""

from __future__ import annotations

from torch import Tensor

from lamina.cache.clock import allocate
from lamina.cache.layers.tokens import TokenLayer

SPARE = 64  # slots that a moved store has more than its ring, or an eighth of the ring if that is more


class Moved(dict[str, Tensor]):
    """Stores [B, H, S, D] of a ring whose token at position p is in slot p - base: in place of `layer.data`."""

    def __init__(self, data: dict[str, Tensor], base: int) -> None:
        super().__init__(data)
        self.base = base


def in_order(layer: TokenLayer, start: int) -> int:
    """Moves the tokens of a ring if the token at position `start` would be stored in front of others that it sees.
    -> the position of slot 0"""
    data, ring = layer.data, layer.layout.ring
    base = data.base if isinstance(data, Moved) else 0
    if ring is None or start - base < layer.slots:
        return base
    first = start + 1 - ring  # the oldest token that a query at `start`, or one after a rewind, can see
    runs = [(first - base, start - base)] if isinstance(data, Moved) else layer.layout.runs(first, start)
    moved = {}
    for name, old in data.items():
        B, H, _, D = old.shape
        new = allocate((B, H, ring - 1 + max(SPARE, ring // 8), D), old.dtype, old.device)
        at = 0
        for slot, end in runs:
            new[:, :, at : at + end - slot].copy_(old[:, :, slot:end])
            at += end - slot
        moved[name] = new
    layer.data = Moved(moved, first)  # keys, values and base at once: an interrupt cannot separate them
    return first


def restore(layer: TokenLayer, end: int) -> None:
    """Moves the tokens before position `end` back to a ring."""
    data, ring = layer.data, layer.layout.ring
    if not isinstance(data, Moved) or ring is None:
        return
    first = max(data.base, end - ring)
    restored = {}
    for name, old in data.items():
        B, H, _, D = old.shape
        new, at = allocate((B, H, ring, D), old.dtype, old.device), first - data.base
        for slot, last in layer.layout.runs(first, end):
            new[:, :, slot:last].copy_(old[:, :, at : at + last - slot])
            at += last - slot
        restored[name] = new
    layer.data = restored
