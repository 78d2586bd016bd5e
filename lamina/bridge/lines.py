"""`Lines`: the fast path of a `Store`, for caches whose tokens are all stored in plain lines on the device.

There the slot of a token is its position. A pass writes its tokens behind the earlier ones and returns a view of the
store, a few operations for each layer. The Lamina cache behind it keeps its lengths in a tensor; it learns of the new
tokens only when something other than a pass is asked of it (`Kept._leave_lines`).
"""

from __future__ import annotations

from torch import Tensor, is_grad_enabled

from lamina.bridge.layers.stored import is_dense
from lamina.cache.cache import Cache
from lamina.cache.layers.base import Key
from lamina.cache.layers.tokens import TokenLayer


class Lines:
    """Passes over plain lines.

    stores    entry -> the stores of its keys and values [B, H, S, D]
    length    tokens of each row, without those of a pass that is still open
    T         tokens of the pass that is open, or was last
    left      entries that the open pass has not written yet; empty if no pass is open
    """

    def __init__(self, cache: Cache, keys: frozenset[Key], length: int) -> None:
        found = {(i, name): cache.layers[i][name].data for i, name in keys}
        self.stores = {key: (data["k"], data["v"]) for key, data in found.items()}
        self.rows, self.length, self.T = cache.rows, length, 0
        self.room = min(k.shape[2] for k, _ in self.stores.values())
        self.left: dict[Key, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def fit(cache: Cache, keys: frozenset[Key]) -> bool:
        """True if every entry that a pass writes is a plain line of keys and values."""
        layers = [cache.layers[i][name] for i, name in keys]
        return bool(keys) and all(isinstance(layer, TokenLayer) and _is_line(layer) for layer in layers)

    def append(self, key: Key, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Stores k and v [B, H, T, D]; -> those of all tokens so far. None if this path cannot: nothing is stored."""
        rows, _, T, _ = k.shape
        if not self.left:
            if self.length + T > self.room or rows != self.rows:
                return None
            self.T, self.left = T, self.stores.copy()
        if T != self.T or ((k.requires_grad or v.requires_grad) and is_grad_enabled()):
            return None  # the longer way stores tokens without their gradients
        stores = self.left.pop(key, None)
        if stores is None:
            return None
        keys, values = stores
        start, end = self.length, self.length + T
        keys.narrow(2, start, T).copy_(k)
        values.narrow(2, start, T).copy_(v)
        if not self.left:
            self.length = end
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    @property
    def written(self) -> set[Key]:
        """Entries that the open pass has written; none if no pass is open."""
        return self.stores.keys() - self.left.keys() if self.left else set()

    def length_of(self, key: Key) -> int:
        """Tokens that an entry holds."""
        return self.length + self.T if self.left and key not in self.left else self.length

    def crop(self, n: int, committed: int) -> bool:
        """Drops the last n tokens; False, and nothing is done, if the Lamina cache knows of them already."""
        if self.left or self.length - n < committed:
            return False
        self.length -= n
        return True


def _is_line(layer: TokenLayer) -> bool:
    return layer.layout.ring is None and is_dense(layer) and layer.data.keys() == {"k", "v"}
