"""`Cache`: a `transformers.Cache` that is one Lamina cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, _foreach_copy_, is_grad_enabled, is_inference_mode_enabled
from torch.compiler import is_dynamo_compiling

from lamina.bridge.kept import Settings, eager, rows_of
from lamina.bridge.layers.kinds import layer_kinds, text_config
from lamina.bridge.layers.specs import Attention, window_of
from lamina.bridge.layers.views import HybridView, IndexedView, LinearView, view_of
from lamina.bridge.model_facts import ModelFacts
from lamina.bridge.pool import Pool
from lamina.bridge.store import Store
from lamina.cache import cache as lamina_cache
from lamina.cache.codec.codec import Codecs
from lamina.cache.counts import check_int
from lamina.cache.storage.host import checked_residence
from lamina.errors import InputError


@eager
def untraced(method: Callable[..., Any], *args: Any) -> Any:
    """Calls a method of a cache while `torch.compile` traces a model."""
    return method(*args)


class Cache(transformers.Cache):
    """Keys, values and states of any transformers model, kept by Lamina. Give it as `past_key_values` or
    `cache_params`. For an encoder–decoder model an `EncoderDecoderCache` is made.

    model_or_config   a transformers model, or its configuration
    capacity          the most tokens a row may hold; None: stores grow as needed
    codec             how keys and values are quantized: a name such as "int8", a `lamina.Codec`, or layer -> either
    residence         "device", or "host": bytes are stored there, and fetched layer by layer
    slack             how many tokens sliding windows and states can be cropped by, at any time
    pool              a `lamina.bridge.Pool`, whose pages store the tokens; slack and codec are those of the pool

    >>> cache = lamina.bridge.Cache(model, codec="int8")                                   # doctest: +SKIP
    >>> model.generate(ids, past_key_values=cache, max_new_tokens=20)                      # doctest: +SKIP
    """

    def __new__(cls, model_or_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        config = getattr(model_or_config, "config", model_or_config)
        if cls is Cache and getattr(config, "is_encoder_decoder", False):
            from lamina.bridge.encoder_decoder import EncoderDecoderCache  # that module imports this one

            return EncoderDecoderCache(model_or_config, *args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        model_or_config: Any,
        capacity: int | None = None,
        codec: Codecs | None = None,
        residence: str = "device",
        slack: int = 0,
        pool: Pool | None = None,
    ) -> None:
        kinds = layer_kinds(text_config(model_or_config))
        if capacity is not None and check_int("capacity", capacity) < 1:
            raise InputError(f"capacity must be at least 1, not {capacity}; None lets the cache grow")
        if check_int("slack", slack) < 0:
            raise InputError(f"slack must be 0 or more, not {slack}")
        if pool is not None:
            slack, codec = _of_pool(pool, residence, slack, codec)
        settings = Settings(capacity, codec, checked_residence(residence), slack, pool)
        self.store = Store(kinds, settings, ModelFacts(model_or_config, len(kinds)))
        self._views = [view_of(self.store, i, kind) for i, kind in enumerate(kinds)]
        self._windows = [kind.window for kind in kinds]
        self.is_sliding = [window is not None for window in self._windows]
        super().__init__(layers=self._views)

    def __repr__(self) -> str:
        return "Cache, empty" if self.store.empty else repr(self.inner)

    # -- passes ----------------------------------------------------------------------------------------------------
    #
    # Models call these for each layer and token, so a pass over plain lines and rings is answered here.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values [B, H, T, D] to a layer. -> those that the new queries may see, in order of
        position"""
        if is_dynamo_compiling():
            return untraced(self.update, key_states, value_states, layer_idx)
        lines = self.store.lines
        if lines is not None and (views := (lines.left or lines.open(key_states)).get(layer_idx)):
            size, new_keys, new_values, keys, values = views
            if key_states.numel() == size and (
                is_inference_mode_enabled()
                if lines.inference
                else not is_grad_enabled() or not (key_states.requires_grad or value_states.requires_grad)
            ):  # the longer way stores tokens without their gradients
                _foreach_copy_((new_keys, new_values), (key_states, value_states))
                del lines.left[layer_idx]
                if not lines.left:
                    lines.close()
                return keys, values
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution [B, …, kernel]; None if there are none."""
        lines = self.store.lines
        state = None if lines is None else lines.state((layer_idx, f"conv{state_idx}"))
        return super().get_conv_state(layer_idx, state_idx) if state is None else state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A recurrent state [B, …]; None if there is none. The model may change it in place."""
        lines = self.store.lines
        state = None if lines is None else lines.state((layer_idx, f"recurrent{state_idx}"))
        return super().get_recurrent_state(layer_idx, state_idx) if state is None else state

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Appends inputs [B, …, T] of a convolution; -> those and up to `conv_kernel_size` before them"""
        if is_dynamo_compiling():
            return untraced(self.update_conv_state, conv_states, layer_idx, state_idx, conv_kernel_size)
        return super().update_conv_state(conv_states, layer_idx, state_idx, conv_kernel_size=conv_kernel_size, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Replaces a recurrent state [B, …]; -> the same"""
        if is_dynamo_compiling():
            return untraced(self.update_recurrent_state, recurrent_states, layer_idx, state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer has states, of which state_idx names one; the last layer that can have them, if None."""
        lines = self.store.lines
        if lines is not None and (layer_idx, f"conv{state_idx or 0}") in lines.states:
            return True
        return super().has_previous_state(layer_idx, state_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each row that a layer holds."""
        lines = self.store.lines
        if lines is not None and not lines.left and layer_idx in lines.layers:
            return lines.length
        return super().get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next token."""
        lines = self.store.lines
        if lines is not None and not lines.left and layer_idx in lines.layers:
            return lines.length
        return super().get_query_offset(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys `update` will return with `query_length` new ones, and the position of the first of them."""
        lines = self.store.lines
        if lines is not None and not lines.left and layer_idx in lines.layers:
            length, window = lines.length, self._windows[layer_idx]
            first = 0 if window is None else max(0, length + 1 - window)
            return length + query_length - first, first
        return super().get_mask_sizes(query_length, layer_idx)

    # -- files -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to a file that `lamina.bridge.load_cache(path, model)` reads."""
        if self._indexed:
            raise InputError("the positions that this model's indexer stores cannot be saved: keep the cache in memory")
        self.inner.save(path)

    @property
    def inner(self) -> lamina_cache.Cache:
        """The Lamina cache behind this one, with every pass committed."""
        return self.store.inner

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        for layer in self.layers:
            yield layer.keys, layer.values

    def __copy__(self) -> Cache:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.fork()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a lamina.bridge.Cache cannot be pickled: its views of one memory would come back as separate copies. "
            "Write it to a file with cache.save(path), and copy it with cache.fork()"
        )

    # -- verbs -----------------------------------------------------------------------------------------------------

    def fork(self) -> Cache:
        """An independent copy."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.store = self.store.fork()
        new.layers = new._views = [view.of(new.store) for view in self._views]
        return new

    def abort(self) -> None:
        """Drops a pass that was not finished, such as one that raised an error; a finished one stays. If the model has
        changed recurrent states in place, the cache is emptied instead, and an error says so."""
        self.store.abort()

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens of every row. A positive number is the length that is kept, as in
        transformers 5.17."""
        n = check_int("tokens_to_remove", tokens_to_remove)
        if n > 0:
            n = min(0, n - self.store.length)
        self.store.crop(-n)
        for view in self._indexed:
            view.indexer_position_ids = view.indexer_position_ids[..., : self.store.length]

    def reset(self) -> None:
        """Empties the cache."""
        self.store.reset()
        for view in self._indexed:
            view.indexer_position_ids = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        if not self.store.empty:
            self.store.reorder(rows := rows_of(beam_idx))
            self._select_positions(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row, copies next to each other."""
        if not self.store.empty:
            self.store.select(rows := [row for row in range(self.inner.rows) for _ in range(repeats)])
            self._select_positions(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows only, in this order. indices: numbers of rows, or a bool for each row"""
        if not self.store.empty:
            self.store.select(rows := rows_of(indices))
            self._select_positions(rows)

    @property
    def _indexed(self) -> list[Any]:
        """Layers whose indexer stores positions."""
        return [view for view in self._views if isinstance(view, IndexedView) and view.indexer_position_ids is not None]

    def _select_positions(self, rows: list[int]) -> None:
        for view in self._indexed:
            view.indexer_position_ids = view.indexer_position_ids[:, rows]

    def activate_past_recording(self) -> None:
        """From now on the tokens of each pass can be cropped, whatever the slack."""
        self.store.recording = True

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | list[int],
        head_dim: int | list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates memory now instead of in the first pass."""
        heads = [num_heads] * len(self.layers) if isinstance(num_heads, int) else num_heads
        dims = [head_dim] * len(self.layers) if isinstance(head_dim, int) else head_dim
        for name, given in (("num_heads", heads), ("head_dim", dims)):
            if len(given) != len(self.layers):
                raise InputError(f"{name} has {len(given)} values, and the cache has {len(self.layers)} layers")
        if self.store.empty:
            specs = {
                view.key: Attention(H, D, D, window_of(view.kind.window), H, dtype)
                for view, H, D in zip(self._views, heads, dims, strict=True)
                if view.kind.attends
            }
            self.store.prepare(specs, batch_size, dtype, torch.device(device))

    # -- facts -----------------------------------------------------------------------------------------------------

    is_compileable = False  # lengths are integers on the host

    is_sliding: list[bool] = []
    """Whether each layer has a window."""

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer has states alone."""
        return [isinstance(view, LinearView) and not isinstance(view, HybridView) for view in self._views]

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a layer wants every input of its convolutions, instead of having their state changed in place."""
        lines = self.store.lines
        if lines is not None and (layer_idx, "conv0") in lines.states:  # a state that the model changes in place
            return False
        return self._views[layer_idx].record_past

    @property
    def batch_size(self) -> int:
        """Rows of the cache; -1 before anything is stored."""
        return self.store.rows or -1

    @property
    def max_batch_size(self) -> int:
        """The name of `batch_size` in older versions."""
        return self.batch_size

    @property
    def max_cache_len(self) -> int:
        """The name of `get_max_length()` in older versions."""
        return self.get_max_length()

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The name of `get_max_length` in older versions."""
        return self.get_max_length(layer_idx)


def _of_pool(pool: Pool, residence: str, slack: int, codec: Codecs | None) -> tuple[int, Codecs | None]:
    """The slack and codec of a cache in this pool."""
    if not isinstance(pool, Pool):
        raise InputError(f"pool={pool!r}: it must be a lamina.bridge.Pool")
    if residence != "device":
        raise InputError(f"residence={residence!r} and a pool were given: pages are on the device; leave one out")
    if slack not in (0, pool.slack) or codec not in (None, pool.codec):
        raise InputError(
            f"slack={slack} and codec={codec!r} were given, and the pool has slack={pool.slack} and "
            f"codec={pool.codec!r}: give them to the pool"
        )
    return pool.slack, pool.codec
