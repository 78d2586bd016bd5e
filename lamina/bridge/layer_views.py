"""The layers of a `lamina.bridge.Cache`, as transformers sees them: thin views of its store."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from lamina.bridge.in_order import first_seen
from lamina.bridge.kinds import LayerKind
from lamina.bridge.specs import Attention, window_of
from lamina.bridge.store import Store
from lamina.cache.layers.base import Key
from lamina.errors import InputError


class AttentionView(CacheLayerMixin):
    """Keys [B, H, T, D] and values of one layer."""

    supports_early_init = True
    is_compileable = False  # the length is an integer on the host

    def __init__(self, store: Store, i: int, kind: LayerKind) -> None:
        self.store, self.index, self.kind = store, i, kind
        self.key: Key = (i, "attention")
        self.is_sliding = kind.window is not None
        if kind.window is not None:
            self.sliding_window = kind.window
        self._spec: Attention | None = None

    def __repr__(self) -> str:
        window = "" if self.kind.window is None else f", window {self.kind.window}"
        return f"{self.kind.name}({self.get_seq_length()} tokens{window})"

    def spec(self, k: Tensor, v: Tensor) -> Attention:
        """What must be remembered, from the keys and values of a pass."""
        if self._spec is None or self._spec.dtype != k.dtype:
            window = window_of(self.kind.window)
            self._spec = Attention(k.shape[1], k.shape[-1], v.shape[-1], window, v.shape[1], k.dtype)
        return self._spec

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values [B, H, T, D]. -> those that the new queries may see, in order of position"""
        spec = self.spec(key_states, value_states)
        found = self.store.extend(self.key, spec, {"k": key_states, "v": value_states})
        return found["k"], found["v"]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Memory is allocated for all layers at once: see `Cache.early_initialization`."""
        raise InputError("layers of this cache are not initialized one by one: call cache.early_initialization(…)")

    # -- facts -----------------------------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        return self.store.length_of(self.key)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.get_seq_length()
        first = first_seen(self.kind.window, length)
        return length + query_length - first, first

    def get_max_length(self) -> int:
        limits = [limit for limit in (self.store.settings.capacity, self.kind.window) if limit is not None]
        return min(limits, default=-1)

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in older versions."""
        return self.get_max_length()

    @property
    def is_initialized(self) -> bool:
        return self.store.holds(self.key)

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def record_past(self) -> bool:
        return self.store.recording

    @record_past.setter
    def record_past(self, record: bool) -> None:
        self.store.recording = record

    @property
    def dtype(self) -> torch.dtype | None:
        return self._spec.dtype if self._spec is not None else None

    @property
    def device(self) -> torch.device | None:
        return self.store.device

    @property
    def keys(self) -> Tensor | None:
        """[B, H, N, D] the keys in order of position: all, or those that the next query can see."""
        return self._field("k")

    @property
    def values(self) -> Tensor | None:
        return self._field("v")

    def _field(self, name: str) -> Tensor | None:
        window = self.kind.window
        found = self.store.read(self.key, None if window is None or self.store.recording else window - 1)
        return None if found is None else found[name]
