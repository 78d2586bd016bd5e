"""`Lines`: the fast path of a `Store`, for caches whose tokens are all stored in plain lines or rings on the device.

In a line the slot of a token is its position. A pass writes its tokens behind the earlier ones and returns a view of
the store. A ring is written so by passes of one token; they read one or two runs of slots. Which slots these are is
computed once per pass for all layers that store alike (`Slots`). Passes of one token also get the stored states
themselves, and change them in place. The Lamina cache behind it keeps its lengths in a tensor; it learns of the new
tokens only when something other than a pass is asked of it (`Kept._leave_lines`).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from lamina.bridge.layers.in_order import first_seen
from lamina.bridge.layers.states import StateLayer
from lamina.bridge.layers.stored import is_dense
from lamina.cache.cache import Cache
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.tokens import TokenLayer


class Slots:
    """Slots that the open pass writes and reads: the same in all stores [B, H, S, D] of one shape and one window.

    Views are made by `as_strided`: it is a single operation, and `narrow` is three.

    new, at       sizes of the slots that are written, and their offset from the first slot in memory
    seen, first   sizes of the slots that are read, and their offset; of a ring, those before its end
    rest          sizes of the slots at the start of a ring that are read behind those; None if there are none
    """

    def __init__(self, store: Tensor, ring: int | None, window: int | None) -> None:
        self.shape, self.strides = store.shape, store.stride()
        self.ring, self.window = ring, window
        self.new: tuple[int, ...]
        self.seen: tuple[int, ...]
        self.rest: tuple[int, ...] | None
        self.at = self.first = 0

    def open(self, start: int, T: int) -> None:
        """Begins a pass of T tokens from position `start` on; of a ring, T is 1."""
        B, H, _, D = self.shape
        begin, slot, step = first_seen(self.window, start), start, self.strides[2]
        if self.ring is not None:
            begin, slot = begin % self.ring, slot % self.ring
        end = slot + T
        self.new, self.at = (B, H, T, D), slot * step
        self.first = begin * step
        if begin < end:
            self.seen, self.rest = (B, H, end - begin, D), None
        else:
            assert self.ring is not None
            self.seen, self.rest = (B, H, self.ring - begin, D), (B, H, end, D)

    def append(self, store: Tensor, offset: int, new: Tensor) -> Tensor:
        """Writes new [B, H, T, D]; -> what the new tokens may see, in the order of positions [B, H, N, D]. offset: of
        the store in memory"""
        store.as_strided(self.new, self.strides, offset + self.at).copy_(new)
        seen = store.as_strided(self.seen, self.strides, offset + self.first)
        if self.rest is None:
            return seen
        return torch.cat([seen, store.as_strided(self.rest, self.strides, offset)], dim=2)


class Stores(NamedTuple):
    """The stores [B, H, S, D] of one entry, their offsets in memory, and their slots in the open pass."""

    keys: Tensor
    keys_at: int
    of_keys: Slots
    values: Tensor
    values_at: int
    of_values: Slots


class Lines:
    """Passes over plain lines and rings.

    stores    entry -> its keys and values
    slots     shape and window -> slots of the stores that have these
    rings     True if an entry is a ring
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
        self.slots: dict[Hashable, Slots] = {}
        self.stores = {key: self._stores(layer) for key, layer in layers.items() if isinstance(layer, TokenLayer)}
        self.rings = any(slots.ring is not None for slots in self.slots.values())
        self.rows, self.length, self.T = cache.rows, length, 0
        limits = [slots.shape[2] for slots in self.slots.values() if slots.ring != slots.shape[2]]  # a whole ring: none
        self.room = min(limits, default=sys.maxsize)
        self.left: dict[Key, Stores] = {}

    def _stores(self, layer: TokenLayer) -> Stores:
        keys, values = layer.data["k"], layer.data["v"]
        ring, window = layer.layout.ring, layer.window.span
        of_keys, of_values = (
            self.slots.setdefault((x.shape, x.stride(), ring, window), Slots(x, ring, window)) for x in (keys, values)
        )
        return Stores(keys, int(keys.storage_offset()), of_keys, values, int(values.storage_offset()), of_values)

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
        T = k.shape[2]
        if not self.left:
            if self.length + T > self.room or k.shape[0] != self.rows or (T > 1 and (self.rings or self.states)):
                return None
            self.T, self.left = T, self.stores.copy()
            self._begin()
            for slots in self.slots.values():
                slots.open(self.length, T)
        if T != self.T or ((k.requires_grad or v.requires_grad) and is_grad_enabled()):
            return None  # the longer way stores tokens without their gradients
        stores = self.left.pop(key, None)
        if stores is None:
            return None
        keys, keys_at, of_keys, values, values_at, of_values = stores
        found = of_keys.append(keys, keys_at, k), of_values.append(values, values_at, v)
        if not self.left:  # only now: a pass whose last tokens could not be stored does not count
            self.length, self.wrote_all = self.length + T, True
        return found

    def _begin(self) -> None:
        """Opens a pass, unless a state was asked for in it already."""
        if self.wrote_all:
            self.wrote_all = False
            self.asked.clear()

    def state(self, key: Key) -> Tensor | None:
        """The state of an entry, for a model that changes it in place; None if there is no such state."""
        state = self.states.get(key)
        if state is None:
            return None
        if len(self.asked) == len(self.states):  # a pass asks for each at least once
            self._begin()
        self.asked.add(key)
        return state

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


def _is_plain(layer: Layer) -> bool:
    if isinstance(layer, StateLayer):
        return layer.storage.residence == "device" and not layer.slack
    plain = isinstance(layer, TokenLayer) and not layer.layout.keep and is_dense(layer)
    return plain and layer.data.keys() == {"k", "v"}
