"""`Lines`: the fast path of a `Store`, for caches whose tokens are all stored in plain lines or rings on the device.

In a line the slot of a token is its position. A pass writes its tokens behind the earlier ones and returns a view of
the store, a few operations for each layer. A ring is written so by passes of one token; they read one or two runs of
slots. Such passes also get the stored states themselves, and change them in place. The Lamina cache behind it keeps its
lengths in a tensor; it learns of the new tokens only when something other than a pass is asked of it
(`Kept._leave_lines`).
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, is_grad_enabled

from lamina.bridge.layers.in_order import first_seen
from lamina.bridge.layers.states import StateLayer
from lamina.bridge.layers.stored import is_dense
from lamina.cache.cache import Cache
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.tokens import TokenLayer


class Lines:
    """Passes over plain lines and rings.

    stores    entry -> the stores of its keys and values [B, H, S, D]
    rings     entry -> its layer, if that is a ring
    states    entry -> its state [B, …], which the model changes in place in passes of one token
    asked     states that the model has asked for in the open pass
    wrote_all True if the open pass, or the last one, has written every store
    length    tokens of each row, without those of a pass that is still open
    T         tokens of the pass that is open, or was last
    left      entries that the open pass has not written yet; empty if no pass is open
    """

    def __init__(self, cache: Cache, keys: frozenset[Key], length: int) -> None:
        layers = {(i, name): cache.layers[i][name] for i, name in keys}
        self.states = {key: layer.data["state"] for key, layer in layers.items() if isinstance(layer, StateLayer)}
        self.asked: set[Key] = set()
        self.wrote_all = False
        self.stores = {
            key: (layer.data["k"], layer.data["v"]) for key, layer in layers.items() if key not in self.states
        }
        self.rings = {
            key: layer for key, layer in layers.items() if isinstance(layer, TokenLayer) and layer.layout.ring
        }
        self.rows, self.length, self.T = cache.rows, length, 0
        whole = {key for key, ring in self.rings.items() if ring.slots == ring.layout.most}  # which have room for ever
        self.room = min((k.shape[2] for key, (k, _) in self.stores.items() if key not in whole), default=sys.maxsize)
        self.left: dict[Key, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def fit(cache: Cache, keys: frozenset[Key]) -> bool:
        """True if every entry that a pass writes is a plain line of keys and values."""
        layers = [cache.layers[i][name] for i, name in keys]
        return Lines.fit_by_one(cache, keys) and all(isinstance(one, TokenLayer) and one.in_line for one in layers)

    @staticmethod
    def fit_by_one(cache: Cache, keys: frozenset[Key]) -> bool:
        """True if passes of one token can go this way: every entry is a plain line or a ring of keys and values, or a
        state that the model changes where it is stored."""
        layers = [cache.layers[i][name] for i, name in keys]
        return any(isinstance(layer, TokenLayer) for layer in layers) and all(_is_plain(layer) for layer in layers)

    def append(self, key: Key, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Stores k and v [B, H, T, D]; -> those of all tokens that the new ones may see. None if this path cannot:
        nothing is stored."""
        rows, _, T, _ = k.shape
        if not self.left:
            if self.length + T > self.room or rows != self.rows or (T > 1 and (self.rings or self.states)):
                return None
            self.T, self.left = T, self.stores.copy()
            self._begin()
        if T != self.T or ((k.requires_grad or v.requires_grad) and is_grad_enabled()):
            return None  # the longer way stores tokens without their gradients
        stores = self.left.pop(key, None)
        if stores is None:
            return None
        keys, values = stores
        start, end = self.length, self.length + T
        if not self.left:
            self.length, self.wrote_all = end, True
        if key in self.rings:
            return _append_to_ring(self.rings[key], keys, values, start, k, v)
        keys.narrow(2, start, T).copy_(k)
        values.narrow(2, start, T).copy_(v)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def _begin(self) -> None:
        """Opens a pass, unless a state was asked for in it already."""
        if self.wrote_all:
            self.wrote_all = False
            self.asked.clear()

    def state(self, key: Key) -> Tensor:
        """The state of an entry, for a model that changes it in place."""
        if len(self.asked) == len(self.states):  # a pass asks for each at least once
            self._begin()
        self.asked.add(key)
        return self.states[key]

    @property
    def begun(self) -> set[Key]:
        """States that the open pass has asked for before it wrote every store; none if no such pass is open."""
        return set() if self.wrote_all else self.asked

    @property
    def written(self) -> set[Key]:
        """Entries that the open pass has written; none if no pass is open."""
        return self.stores.keys() - self.left.keys() if self.left else set()

    def length_of(self, key: Key) -> int:
        """Tokens that an entry holds."""
        open_pass = self.left and key in self.stores and key not in self.left
        return self.length + self.T if open_pass else self.length

    def crop(self, n: int, committed: int) -> bool:
        """Drops the last n tokens; False, and nothing is done, if the Lamina cache knows of them already, or must say
        whether a ring still has what they replaced, or a state that was before them."""
        if self.left or self.rings or self.states or self.length - n < committed:
            return False
        self.length -= n
        return True


def _append_to_ring(
    layer: TokenLayer, keys: Tensor, values: Tensor, start: int, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Stores one token at position `start`; -> keys and values that it sees, in the order of their positions"""
    ring = layer.layout.ring
    assert ring is not None
    slot = start % ring
    keys.narrow(2, slot, 1).copy_(k)
    values.narrow(2, slot, 1).copy_(v)
    first = first_seen(layer.window.span, start)
    begin = first % ring
    if begin <= slot:
        return keys.narrow(2, begin, slot + 1 - begin), values.narrow(2, begin, slot + 1 - begin)
    return _around(keys, begin, slot + 1, ring), _around(values, begin, slot + 1, ring)


def _around(store: Tensor, begin: int, end: int, ring: int) -> Tensor:
    """Slots begin … ring - 1, then 0 … end - 1."""
    return torch.cat([store.narrow(2, begin, ring - begin), store.narrow(2, 0, end)], dim=2)


def _is_plain(layer: Layer) -> bool:
    if isinstance(layer, StateLayer):
        return layer.storage.residence == "device" and not layer.slack
    plain = isinstance(layer, TokenLayer) and not layer.layout.keep and is_dense(layer)
    return plain and layer.data.keys() == {"k", "v"}
