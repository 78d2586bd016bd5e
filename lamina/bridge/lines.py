"""`Lines`: the fast path of a `Store`, for caches whose tokens are all stored in plain lines or rings on the device.

A pass writes its tokens behind the earlier ones and returns a view of the store: one copy and no other operation for
keys, and one for values (`Cache.update`). The views of the next passes are made together, since that takes half the
time of making each on its own. In inference mode they are views of a tensor of that mode over the same memory: PyTorch
does less for those, and so do the model's operations that read them. Rings take passes of one token this way, once
their slots are in the order of positions (windows.py). Such passes also get the stored states themselves, and change
them in place. The Lamina cache behind it keeps its lengths in a tensor; it learns of the new tokens only when something
other than a pass is asked of it (`Kept._leave_lines`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import repeat

from torch import Tensor, empty, is_inference_mode_enabled

from lamina.bridge.layers.in_order import first_seen
from lamina.bridge.layers.states import StateLayer
from lamina.bridge.layers.stored import is_dense
from lamina.bridge.windows import in_order, restore
from lamina.cache.cache import Cache
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.tokens import TokenLayer

AHEAD = 32  # passes whose views are made together, at most

Views = tuple[int, Tensor, Tensor, Tensor, Tensor]
"""Of one layer in one pass: how many elements its new keys have; the slots of the new keys and of the new values
[B, H, T, D]; and all keys and all values that the new tokens may see, in order of position [B, H, N, D]."""
NONE: dict[int, Views] = {}


class Lines:
    """Passes over plain lines and rings.

    layers    number of a layer -> the store of its keys and values
    rings     True if one of them is a ring
    states    entry -> its state [B, …], which the model changes in place in passes of one token
    asked     states that the model has asked for in the open pass -> how often each had been changed before
    wrote_all True if the open pass, or the last one, has written every store
    length    tokens of each row, without those of a pass that is still open
    T         tokens of the pass that is open, or was last
    left      number of a layer -> its views, for layers that the open pass has not written yet; empty if none is open
    inference True if the views can be used in inference mode alone
    """

    def __init__(self, cache: Cache, keys: frozenset[Key], length: int) -> None:
        layers = {(i, name): cache.layers[i][name] for i, name in keys}
        self.states = {key: layer.data["state"] for key, layer in layers.items() if isinstance(layer, StateLayer)}
        self.asked: dict[Key, int] = {}
        self.wrote_all = False
        self.layers = {i: layer for (i, _), layer in layers.items() if isinstance(layer, TokenLayer)}
        self.rings = any(layer.layout.ring is not None for layer in self.layers.values())
        self.rows, self.length, self.T = cache.rows, length, 0
        growing = [layer.slots for layer in self.layers.values() if layer.slots != layer.layout.ring]
        self.room = min(growing, default=sys.maxsize)  # a whole ring has room for any token
        self.left: dict[int, Views] = {}
        self.inference = False
        self._slots: dict[int, tuple[object, Slots, Slots]] = {}  # number of a layer -> its data, and slots of both
        self._ahead = 1
        self._ready: list[dict[int, Views]] = []  # views of the next passes of one token, those of the next pass last
        self._ready_at = 0  # the length at which the next of them begins

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

    # -- passes ----------------------------------------------------------------------------------------------------

    def open(self, k: Tensor) -> dict[int, Views]:
        """Opens a pass whose first keys are k [B, H, T, D]. -> `left`; empty if this path cannot"""
        rows, _, T, _ = k.shape
        start = self.length
        if start + T > self.room or rows != self.rows or (T > 1 and (self.rings or self.states)):
            return NONE
        if self.wrote_all and len(self.asked) < len(self.states):  # the pass before this one ended early
            return NONE
        stale = self._ready_at != start or (self.inference and not is_inference_mode_enabled())
        if T > 1 or stale or not self._ready:
            self._ready = self._views(start, T)
        self.T, self.left, self._ready_at = T, self._ready.pop(), start + 1
        if self.wrote_all:
            self._begin()
        return self.left

    def close(self) -> None:
        """Ends a pass that has written every store: only now do its tokens count."""
        self.length, self.wrote_all = self.length + self.T, True

    def _views(self, start: int, T: int) -> list[dict[int, Views]]:
        """The views of a pass of T tokens from position `start` on; if T is 1, also those of some that follow."""
        if self.inference is not is_inference_mode_enabled():
            self.inference = not self.inference
            self._slots.clear()
        bases = {i: in_order(layer, start) for i, layer in self.layers.items()}
        fit = min(layer.slots - (start - bases[i]) for i, layer in self.layers.items())
        count = min(self._ahead, fit) if T == 1 else 1
        self._ahead = min(2 * self._ahead, AHEAD)
        found: list[dict[int, Views]] = [{} for _ in range(count)]
        for i, layer in self.layers.items():
            data, window, known = layer.data, layer.window.span, self._slots.get(i)
            if known is None or known[0] is not data:  # a window that has moved
                known = self._slots[i] = data, Slots(data["k"]), Slots(data["v"])
            _, k, v = known
            new_keys, keys = k.views(bases[i], start, T, count, window)
            new_values, values = v.views(bases[i], start, T, count, window)
            sizes = repeat(k.width * T, count)
            each = zip(sizes, new_keys, new_values, keys, values, strict=True)
            for views, of_pass in zip(found, each, strict=True):
                views[i] = of_pass
        return found[::-1]

    def _begin(self) -> None:
        """Begins a pass behind one that has written every store."""
        self.wrote_all = False
        self.asked.clear()

    def state(self, key: Key) -> Tensor | None:
        """The state of an entry, for a model that changes it in place; None if there is no such state."""
        state = self.states.get(key)
        if state is None:
            return None
        if self.wrote_all and len(self.asked) == len(self.states):  # a pass asks for each at least once
            self._begin()
        self.asked.setdefault(key, state._version)
        return state

    # -- what else is asked ----------------------------------------------------------------------------------------

    @property
    def ended_early(self) -> bool:
        """True if the last pass has written every store and is counted, but has not asked for every state."""
        return self.wrote_all and len(self.asked) < len(self.states)

    @property
    def begun(self) -> dict[Key, int]:
        """`asked` of a pass that has not ended; empty if no such pass is open."""
        return self.asked if self.ended_early or not self.wrote_all else {}

    @property
    def written(self) -> set[Key]:
        """Stores that a pass which has not ended has written; none if no pass is open."""
        is_open = self.left or self.ended_early
        return {(i, "attention") for i in self.layers.keys() - self.left.keys()} if is_open else set()

    def length_of(self, key: Key) -> int:
        """Tokens that an entry holds."""
        return self.length + self.T if self.left and key in self.written else self.length

    def crop(self, n: int, committed: int) -> bool:
        """Drops the last n tokens; False, and nothing is done, if the Lamina cache knows of them already, or must say
        whether a ring still has what they replaced, or a state that was before them."""
        if self.left or self.rings or self.states or self.length - n < committed:
            return False
        self.length -= n
        return True

    def restore(self) -> None:
        """Puts the tokens of rings where the Lamina cache expects them. After an interrupt it may be called again."""
        end = self.length + (self.T if self.left else 0)
        for layer in self.layers.values():
            restore(layer, end)


class Slots:
    """The slots of one store [B, H, S, D], and views of them. `as_strided` is a single operation, and `narrow` is
    three; `split_with_sizes` and `unbind` make several views at once.

    width   elements in one slot of all rows and heads
    """

    def __init__(self, store: Tensor) -> None:
        (B, H, _, D), self._strides, self._here = store.shape, store.stride(), store.storage_offset()
        self._shape, self._step, self.width = (B, H, D), self._strides[2], B * H * D
        if is_inference_mode_enabled():  # a tensor of that mode over the same memory
            memory, shape = store.untyped_storage(), store.shape
            store = empty(0, dtype=store.dtype, device=store.device).set_(memory, self._here, shape, self._strides)
        # `data`: what earlier passes read does not change, so autograd may keep it (`Kept.note_rewritten`).
        self._written, self._read = store.data, store

    def views(
        self, base: int, start: int, T: int, count: int, window: int | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """For `count` passes of T tokens from position `start` on: what they write, and what they read. base: the
        position of slot 0, which is 0 without a window"""
        (B, H, D), strides, store = self._shape, self._strides, self._read
        here, step = self._here, self._step
        new = self._written.as_strided((B, H, count * T, D), strides, here + (start - base) * step)
        slots = new.split_with_sizes((T,) * count, 2)
        if window is None:
            return slots, [store.as_strided((B, H, end, D), strides) for end in range(start + T, start + T + count)]
        if start + 1 >= window:  # each reads a whole window, one slot behind that of the pass before it
            first = here + (start + 1 - window - base) * step
            return slots, store.as_strided((count, B, H, window, D), (step, *strides), first).unbind(0)
        firsts = [(at, first_seen(window, at)) for at in range(start, start + count)]
        return slots, [
            store.as_strided((B, H, at + 1 - first, D), strides, here + (first - base) * step) for at, first in firsts
        ]


def _is_plain(layer: Layer) -> bool:
    if isinstance(layer, StateLayer):
        return layer.storage.residence == "device" and not layer.slack
    plain = isinstance(layer, TokenLayer) and not layer.layout.keep and is_dense(layer)
    return plain and layer.data.keys() == {"k", "v"}
