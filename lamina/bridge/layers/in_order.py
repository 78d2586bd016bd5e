"""Stores the tokens of a pass in a layer, and reads in the order of positions what its queries may see.

The masks of transformers describe keys in the order of their positions: `kv_length` of them from position `kv_offset`.
A line is in that order, so a view of it is returned and nothing is copied. A ring that has wrapped is two runs of
slots, which are concatenated.
"""

from __future__ import annotations

import torch

from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.step import Step
from lamina.cache.storage.device import Storage


def first_seen(window: int | None, length: int) -> int:
    """First position that queries from position `length` on can see, with a window of this many tokens.

    >>> first_seen(None, 9), first_seen(4, 2), first_seen(4, 9)
    (0, 0, 6)
    """
    return 0 if window is None else max(0, length + 1 - window)


def extend(layer: TokenLayer, step: Step, key: Key, start: int, new: Fields) -> Fields:
    """Stores parts [B, *lead, T, width] at positions start …; -> the parts of all tokens that their queries may see"""
    layout, T = layer.layout, step.T
    if layout.ring is None and type(layer.storage) is Storage:  # the usual case, with as little work as possible
        found = {name: _append(store, start, T, new[name]) for name, store in layer.data.items()}
        step.wrote(key)  # only now: a layer whose tokens could not be stored has not written them
        return found
    append(layer, step, key, start, new)
    first = first_seen(layer.window.span, start)
    if layout.ring is not None and T > 1:
        return joined([*runs(layer, step, first, start), new])
    seen = joined(runs(layer, step, first, start + T))
    if T > 1 and step.staged is not None:
        # A view of a staging buffer. Once the last layer has stored, the pass is committed, which stages rings whose
        # tokens were left until then, before the model's attention reads this.
        return {name: x.clone() for name, x in seen.items()}
    return seen


def append(layer: TokenLayer, step: Step, key: Key, start: int, new: Fields) -> None:
    """Stores parts at positions start …. A ring is written now if T is 1, and otherwise when the pass is committed, as
    in `TokenLayer.extend`."""
    ring = layer.layout.ring
    if ring is not None and step.T > 1:
        step.leave(key, new)
        return
    layer.storage.write_run(layer.data, step, start if ring is None else start % ring, new)
    step.wrote(key)


def _append(store: torch.Tensor, start: int, T: int, new: torch.Tensor) -> torch.Tensor:
    store.data.narrow(-2, start, T).copy_(new)  # `data`: what earlier passes read does not change
    return store.narrow(-2, 0, start + T)


def runs(layer: TokenLayer, step: Step, first: int, end: int) -> list[Fields]:
    """The parts of positions first … end - 1, in as few runs of slots as there are."""
    return [layer.storage.read_run(layer.data, step, *run) for run in layer.layout.runs(first, end)]


def joined(pieces: list[Fields]) -> Fields:
    """The pieces one after the other; a single one is not copied."""
    if len(pieces) == 1:
        return pieces[0]
    return {name: torch.cat([piece[name].to(pieces[-1][name].dtype) for piece in pieces], dim=-2) for name in pieces[0]}
