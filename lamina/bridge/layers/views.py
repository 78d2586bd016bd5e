"""The layers of a `lamina.bridge.Cache`, as transformers sees them: thin views of its store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from lamina.bridge.layers.in_order import first_seen
from lamina.bridge.layers.kinds import LayerKind
from lamina.bridge.layers.specs import Attention, Columns, Cross, Index, State, window_of
from lamina.bridge.store import Store
from lamina.cache.layers.base import Key
from lamina.errors import InputError


class View:
    """What all views have in common."""

    is_compileable = False  # lengths are integers on the host
    is_sliding = False
    supports_early_init = True

    def __init__(self, store: Store, i: int, kind: LayerKind) -> None:
        self.store, self.index, self.kind = store, i, kind
        self.key: Key = (i, "attention")

    def __repr__(self) -> str:
        return self.kind.name

    def of(self, store: Store) -> Self:
        """The view of the same layer in another store."""
        return type(self)(store, self.index, self.kind)

    def restore(self) -> None:
        """Takes what the view knows of its layer from the store, after a cache was loaded."""

    @property
    def device(self) -> torch.device | None:
        return self.store.device

    @property
    def record_past(self) -> bool:
        return self.store.recording

    @record_past.setter
    def record_past(self, record: bool) -> None:
        self.store.recording = record

    def activate_past_recording(self) -> None:
        self.store.recording = True

    # The verbs act on all layers at once.

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise self._whole("early_initialization")

    def reset(self) -> None:
        raise self._whole("reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise self._whole("reorder_cache")

    def crop(self, tokens_to_remove: int) -> None:
        raise self._whole("crop")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise self._whole("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise self._whole("batch_select_indices")

    def offload(self) -> None:
        """Bytes are where `residence` says; nothing is moved by hand."""

    def prefetch(self) -> None:
        """See `offload`."""

    def _whole(self, verb: str) -> InputError:
        return InputError(f"layer {self.index} alone cannot do {verb}: all layers are one cache, so call cache.{verb}")


class AttentionView(View, CacheLayerMixin):
    """Keys [B, H, T, D] and values of one layer."""

    def __init__(self, store: Store, i: int, kind: LayerKind) -> None:
        super().__init__(store, i, kind)
        self.is_sliding = kind.window is not None
        if kind.window is not None:
            self.sliding_window = kind.window
        self._spec: Attention | None = None

    def restore(self) -> None:
        super().restore()
        spec = self.store.specs.get(self.key)
        self._spec = spec if isinstance(spec, Attention) else None

    def spec(self, k: Tensor, v: Tensor) -> Attention:
        """What must be remembered, from the keys and values of a pass."""
        if self._spec is None or self._spec.dtype != k.dtype:
            window = window_of(self.kind.window)
            self._spec = Attention(k.shape[1], k.shape[-1], v.shape[-1], window, v.shape[1], k.dtype)
        return self._spec

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values [B, H, T, D]. -> those that the new queries may see, in order of position"""
        found = self.store.extend(self.key, self.spec(key_states, value_states), {"k": key_states, "v": value_states})
        return found["k"], found["v"]

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
    def dtype(self) -> torch.dtype | None:
        return None if self._spec is None else self._spec.dtype

    @property
    def keys(self) -> Tensor | None:
        """[B, H, N, D] in order of position: all keys, or those that the next query can see. In a cache of a fixed
        capacity N is the capacity, or the window, and keys that are not there yet are zero."""
        return self._field("k")

    @property
    def values(self) -> Tensor | None:
        return self._field("v")

    def _field(self, name: str) -> Tensor | None:
        window, most = self.kind.window, self.get_max_length()
        if self.store.settings.capacity is None:
            found = self.store.read(self.key, None if window is None or self.store.recording else window - 1)
            return None if found is None else found[name]
        found = self.store.read(self.key, most)
        return None if found is None else pad(found[name], (0, 0, 0, most - found[name].shape[-2]))


class IndexedView(AttentionView):
    """Keys and values, and the keys of an indexer."""

    def __init__(self, store: Store, i: int, kind: LayerKind) -> None:
        super().__init__(store, i, kind)
        self.index_key: Key = (i, "index")
        self.indexer_position_ids: Tensor | None = None  # [P, B, T], written by the model

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Appends the keys [B, T, D] of an indexer; -> all of them"""
        spec = Index(indexer_key_states.shape[-1], dtype=indexer_key_states.dtype)
        return self.store.extend(self.index_key, spec, {"x": indexer_key_states})["x"]

    def of(self, store: Store) -> Self:
        new = super().of(store)
        new.indexer_position_ids = self.indexer_position_ids
        return new

    @property
    def indexer_keys(self) -> Tensor | None:
        found = self.store.read(self.index_key)
        return None if found is None else found["x"]

    @property
    def is_indexer_initialized(self) -> bool:
        return self.store.holds(self.index_key)


class StateViews(Mapping[int, Any]):
    """state index -> something about that state, looked up by its entry when it is asked for."""

    def __init__(self, keys: dict[int, Key], find: Callable[[Key], Any]) -> None:
        self._keys, self._find = keys, find

    def __getitem__(self, i: int) -> Any:
        return self._find(self._keys[i])

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class LinearView(View, LinearAttentionCacheLayerMixin):
    """Convolution and recurrent states of one layer.

    Unless convolution inputs are kept as a state, its past is always recorded: then models give every input of a
    convolution, instead of changing its state in place.
    """

    supports_early_init = False

    def __init__(self, store: Store, i: int, kind: LayerKind) -> None:
        super().__init__(store, i, kind)
        self.number_of_states = kind.states
        self.conv_kernel_size: dict[int, int] = {}
        conv: dict[int, Key] = {n: (i, f"conv{n}") for n in range(kind.states)}
        recurrent: dict[int, Key] = {n: (i, f"recurrent{n}") for n in range(kind.states)}
        self.conv_states = StateViews(conv, self._conv)
        self.recurrent_states = StateViews(recurrent, store.state)
        self.has_previous_state = StateViews(conv, lambda key: store.length_of(key) > 0)
        self.is_conv_states_initialized = StateViews(conv, store.holds)
        self.is_recurrent_states_initialized = StateViews(recurrent, store.holds)

    def of(self, store: Store) -> Self:
        new = super().of(store)
        new.conv_kernel_size = dict(self.conv_kernel_size)
        return new

    def restore(self) -> None:
        super().restore()
        for n in range(self.kind.states):
            spec = self.store.specs.get((self.index, f"conv{n}"))
            if isinstance(spec, Columns | State):
                self.conv_kernel_size[n] = spec.kernel if isinstance(spec, Columns) else spec.shape[-1]

    @property
    def record_past(self) -> bool:
        return not isinstance(self.store.specs.get((self.index, "conv0")), State)

    @record_past.setter
    def record_past(self, record: bool) -> None:
        self.store.recording = record

    def _conv(self, key: Key) -> Tensor | None:
        return self.store.last_columns(key, self.conv_kernel_size.get(int(key[1].removeprefix("conv")), 1))

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Appends inputs [B, …, T] of a convolution; -> those and up to `conv_kernel_size` before them"""
        kernel = self.conv_kernel_size.setdefault(state_idx, conv_kernel_size or conv_states.shape[-1])
        return self.store.columns((self.index, f"conv{state_idx}"), conv_states, kernel)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self.store.set_state((self.index, f"recurrent{state_idx}"), recurrent_states)

    @property
    def is_croppable(self) -> bool:
        """Whether any tokens can be dropped: states must be kept for that, as many as the slack says."""
        return self.store.slack > 0 or not self.store.has_states

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class HybridView(LinearView, AttentionView):
    """Keys and values, and states, of one layer."""

    supports_early_init = True

    def __init__(self, store: Store, i: int, kind: LayerKind) -> None:
        LinearView.__init__(self, store, i, kind)
        self.is_sliding = kind.window is not None
        if kind.window is not None:
            self.sliding_window = kind.window
        self._spec = None

    def get_max_length(self) -> int:
        return AttentionView.get_max_length(self)


class CrossView(AttentionView):
    """Keys and values of an encoder's output, which a decoder layer attends to."""

    def __init__(self, store: Store, i: int, kind: LayerKind) -> None:
        super().__init__(store, i, kind)
        self.key = (i, "cross")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, H, S, D] in place of those that were there."""
        heads, dims = key_states.shape[1], (key_states.shape[-1], value_states.shape[-1])
        found = self.store.set_source(
            self.key, Cross(heads, *dims, dtype=key_states.dtype), {"k": key_states, "v": value_states}
        )
        return found["k"], found["v"]

    def get_seq_length(self) -> int:
        keys = self.keys
        return 0 if keys is None else keys.shape[-2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _field(self, name: str) -> Tensor | None:
        found = self.store.source(self.key)
        return None if found is None else found[name]


def view_of(store: Store, i: int, kind: LayerKind) -> View:
    """The view of a layer of this kind."""
    if kind.indexed:
        return IndexedView(store, i, kind)
    if kind.attends:
        return HybridView(store, i, kind) if kind.states else AttentionView(store, i, kind)
    return LinearView(store, i, kind)
