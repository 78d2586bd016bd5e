"""`Step`: one forward pass with PyTorch operations, which is opened, run, and committed or aborted.

`cache.step(T)` checks all arguments on the host and makes room, so a pass that cannot be run raises before anything is
written. The pass itself works on plain tensors: `positions`, `valid`, `before`, `after`. A layer that must not write
its new tokens yet hands them over with `leave`; `commit` stores each row's accepted tokens and advances the clock.
Until then the cache's lengths and committed contents are unchanged.

`Step.alone` makes the same object for a pass without a cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lamina.attention.core import Backend
from lamina.attention.rotary import RopeTable, rotate, rotate_widened, widened
from lamina.attention.torch_backends import recorder
from lamina.attention.view import View
from lamina.attention.window import Window
from lamina.cache.clock import on_device
from lamina.cache.counts import Counts, CountsLike
from lamina.cache.layers.base import Key, Layer
from lamina.cache.memory import Memory
from lamina.cache.passes import last_tokens
from lamina.cache.plain_backend import PLAIN, PlainBackend
from lamina.cache.segments import Packing
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache
    from lamina.cache.spec import LayerSpecs
    from lamina.cache.storage.prefetch import StagedPass

X = TypeVar("X")
Layers = Sequence[Mapping[str, Layer]]


class Step:
    """One pass of T tokens per row over R rows of a cache. Made by `cache.step`; model code uses only `memory(i)` and
    `positions`."""

    backend: PlainBackend = PLAIN
    recomputes = False  # True if the cache stores ids only: see recompute.py

    def __init__(
        self,
        layers: Layers,
        T: int,
        before: Tensor,  # [R] lengths of the rows in this pass
        counts: Tensor | None,  # [R] how many of the T tokens are real; None: all
        *,
        cache: Cache | None = None,
        rows: list[int] | None = None,  # indices of the R rows; None: every row of the cache, in order
        start: int | None = None,  # the length of every row, if the host knows that all are equal
        bound: int | None = None,  # upper bound on the lengths after the pass
        given: Counts | None = None,  # `counts` with the host's bounds
        segments: Tensor | None = None,  # [R, T] packed sequences: see segments.py
        spans: Tensor | None = None,  # [R, T] see `Cache.step`
        causal: bool = True,
    ) -> None:
        device = before.device
        self.layers, self.T, self.cache = layers, T, cache
        self.before, self.counts = before, counts
        self.rows = rows
        self.spans, self.causal = spans, causal
        self.packing = None if segments is None else Packing(segments)
        self.segments = None if self.packing is None else self.packing.segment
        self._start, self._bound = start, bound
        self._slice = _as_slice(rows)

        time = torch.arange(T, device=device)
        self.valid = None if counts is None else time < counts[:, None]  # [R, T]
        self.positions = before[:, None] + time if self.packing is None else self.packing.positions  # [R, T]
        if self.valid is not None:  # in a full row, padding would index past the end of a learned position table
            self.positions = torch.where(self.valid, self.positions, 0)
        self.all_counts = torch.full_like(before, T) if counts is None else counts
        self.given = given or Counts(self.all_counts, [T] * len(before), [T] * len(before))
        self.after = before + self.all_counts
        # [R, T] token index, where padding repeats the row's last real token
        self.real_tokens = None if counts is None else torch.minimum(time, counts[:, None] - 1)
        self.new_positions = self.positions if self.valid is None else torch.where(self.valid, self.positions, -1)
        self.row_index = torch.arange(len(before), device=device) if rows is None else on_device(rows, device)

        self.cut = False  # True if lines are cut to end with this pass's tokens (all real, rows of equal length)
        self.attention: str | None = None  # name of the `lamina.attention` backend; None: the best that fits
        self.attended: dict[Key, tuple[Tensor, Tensor]] | None = None  # see `record_attentions`
        self.source: Any = None  # (layer, entry) -> cross-attention keys and values, for a pass without a cache
        self.ids: Tensor | None = None
        self.logits: Tensor | None = None  # [R, T, vocab], or [R, vocab] after each row's last real token
        self.hidden: dict[int, Tensor] = {}  # layer -> hidden states [R, T, width], those asked for
        self.staged: StagedPass | None = None  # fetches layers that are stored on the host
        self.closed = False
        self.ran = False  # True once every block has run in this pass
        self.written: set[Key] = set()  # entries that have stored or left this pass's tokens, if `ran` is not set
        self.moves_base = False  # True if commit moves the base state of some row: see layers/recurrent.py
        self.is_packed = False  # True if blocks ran over the real tokens of all rows side by side: see packed.py
        self.whole = False  # True if commit is known to take all real tokens, so that layers keep less for it
        self.exported = False  # True in an exported program: unused slots hold finite values, `bound` is read in it
        self.base = before  # [R] position of each row's recurrent base state
        self._pending: dict[Key, Any] = {}
        self._written_states: list[Layer] = []  # see `write_at_once`
        self._dropped: weakref.finalize[..., Any] | None = None
        self._made: dict[Hashable, Any] = {}
        self._widened: tuple[Tensor, RopeTable] | None = None  # cosines, and their table made wide
        self._shared: dict[Key, tuple[Tensor, Tensor, View]] = {}
        self._selections: dict[Key, Tensor | None] = {}

    @classmethod
    def alone(
        cls,
        specs: Sequence[LayerSpecs],
        shape: tuple[int, int],
        device: torch.device,
        counts: Tensor | None = None,
        segments: Tensor | None = None,
        spans: Tensor | None = None,
        causal: bool = True,
    ) -> Step:
        """A pass without a cache over blocks of these specs. shape: (R, T); causal=False: tokens see later ones too
        (encoders)."""
        layers = [{name: spec.layer(None) for name, spec in entry.items()} for entry in specs]
        before = torch.zeros(shape[0], dtype=torch.int64, device=device)
        return cls(layers, shape[1], before, counts, start=0, segments=segments, spans=spans, causal=causal)

    # -- for model code --------------------------------------------------------------------------------------------

    def memory(self, i: int) -> Memory:
        """The memory of layer `i` of the model."""
        return Memory(self, i, self.entries(i))

    def entries(self, i: int) -> Mapping[str, Layer]:
        """The entries of layer `i`, on the device; valid until another layer is asked for."""
        return self.layers[i] if self.staged is None else self.staged.entry(i, self)

    def last(self, x: Tensor) -> Tensor:
        """[R, T, W] -> [R, W] of each row's last real token"""
        return last_tokens(x, self.all_counts)

    def has_run(self, ids: Tensor | None) -> None:
        """Notes that every block has run over these ids."""
        self.ids, self.ran = ids, True

    def record_attentions(self) -> dict[Key, tuple[Tensor, Tensor]]:
        """Records attention in this pass: (layer, entry) -> attention weights [R, Hq, T, S], and the position that each
        slot holds [R, S], -1 for none. The returned dictionary is filled when the model runs."""
        self.attended = {}
        return self.attended

    # -- for layers ------------------------------------------------------------------------------------------------

    @property
    def start(self) -> int | None:
        """The length of every row before this pass, if the host knows that all are equal; slots are then a slice.

        None if there is padding, or if the rows are not consecutive (no view selects them). None while compiling too:
        an integer that changes from step to step would compile a new graph each time.
        """
        if torch.compiler.is_compiling() or self.counts is not None or (self.rows is not None and self._slice is None):
            return None
        return self._start

    @property
    def bound(self) -> int | None:
        """Upper bound on the lengths of the rows after this pass; None while compiling, except in an exported program,
        which reads it from the lengths."""
        return None if torch.compiler.is_compiling() and not self.exported else self._bound

    @property
    def empty_before(self) -> bool:
        """Whether the host knows that every row was empty before this pass."""
        return self._start == 0 and not torch.compiler.is_compiling()

    def take(self, tensor: Tensor) -> Tensor:
        """Selects the rows of this pass: the tensor itself or a view if possible. [B, ...] -> [R, ...]"""
        if self.rows is None:
            return tensor
        return tensor[self._slice] if self._slice is not None else tensor.index_select(0, self.row_index)

    def put(self, tensor: Tensor, new: Tensor) -> None:
        """Writes the rows of this pass. tensor [B, ...], new [R, ...]"""
        if self.rows is None:
            tensor.copy_(new)
        else:
            tensor.index_copy_(0, self.row_index, new.to(tensor.dtype))

    def leave(self, key: Key, pending: Any) -> None:
        """Keeps what a layer has not written yet, for the layer's `fold` and `commit`."""
        if self.cache is not None:
            self._pending[key] = pending if self.staged is None else self.staged.leave(key, pending)
            self.wrote(key)

    def write_at_once(self, layer: Layer) -> None:
        """Notes that a layer writes the states of its rows, which were empty, before commit. They are zeroed if the
        pass is aborted, or dropped by an interrupt."""
        assert self.cache is not None
        if self._dropped is None:
            self._dropped = weakref.finalize(self, _zero, self.cache, self.rows, self.row_index, self._written_states)
            self._dropped.atexit = False
        self._written_states.append(layer)

    def wrote(self, key: Key) -> None:
        """Notes that a layer has stored this pass's tokens; a pass cannot be committed before all layers have."""
        if not torch.compiler.is_compiling():
            self.written.add(key)

    def share(self, key: Key, k: Tensor, v: Tensor, view: View) -> None:
        """Keeps a layer's keys and values for the layers that read it later in this pass."""
        if self.cache is None or key in self.cache.shared:
            self._shared[key] = (k, v, view)

    def shared(self, key: Key, reader: Key) -> tuple[Tensor, Tensor, View]:
        if key not in self._shared:
            raise InputError(
                f"layer {reader[0]} shares layer {key[0]} entry {key[1]!r}, which has not attended in this pass"
            )
        return self._shared[key]

    def share_selection(self, key: Key, chosen: Tensor | None) -> None:
        """Keeps the selection of an indexer for the layers that read it later in this pass."""
        if self.cache is None or key in self.cache.shared:
            self._selections[key] = chosen

    def shared_selection(self, key: Key, reader: Key) -> Tensor | None:
        if key not in self._selections:
            raise InputError(
                f"layer {reader[0]} shares layer {key[0]} entry {key[1]!r}, which has not selected in this pass"
            )
        return self._selections[key]

    def attention_of(self, key: Key) -> str | Backend | None:
        """The backend of `lamina.attention` for this layer."""
        attended = self.attended
        if attended is None:
            return self.attention
        return recorder(lambda shares, view: attended.update({key: (shares, view.kv_positions)}))

    def source_of(self, key: Key) -> dict[str, Tensor] | None:
        return None if self.source is None else self.source[key]

    def once(self, kind: Hashable, make: Callable[[], X]) -> X:
        """What `make` returns, made once per pass and shared by all layers that ask for this kind."""
        if kind not in self._made:
            self._made[kind] = make()
        return self._made[kind]

    def view(self, kind: Hashable, make: Callable[[], View]) -> View:
        """The View of this kind, shared in the same way."""
        return self.once(kind, make)

    def rotated(self, x: Tensor, rope: RopeTable) -> Tensor:
        """Rotates x [B, H, T, D] by RoPE. The widened table is made once per pass, for all layers."""
        if (torch.compiler.is_compiling() and not self.exported) or 2 * rope[0].shape[-1] != x.shape[-1]:
            return rotate(x, rope)
        if self._widened is None or self._widened[0] is not rope[0]:
            self._widened = rope[0], widened(rope)
        return rotate_widened(x, self._widened[1])

    def view_of_new(self, window: Window) -> View:
        """The View of this pass's tokens over each other."""
        plain = self.counts is None and self.segments is None and self.spans is None
        return View(
            self.positions, self.new_positions, window, self.causal, exact=plain,
            q_segments=self.segments, kv_segments=self.segments, q_spans=self.spans, kv_spans=self.spans,
        )  # fmt: skip

    def view_of_run(self, window: Window, first: int, end: int) -> View:
        """The View over positions first … end - 1 in order, the last T of which are this pass's tokens."""
        held = torch.arange(first, end, device=self.before.device).expand(len(self.before), -1)
        if self.spans is not None:
            return self.view_of(window, held, new_at=end - first - self.T)
        return View(self.positions, held, window, exact=True)

    def view_of(self, window: Window, held: Tensor, new_at: int | None = None) -> View:
        """The View over slots that hold the positions `held` [R, S]. This pass's tokens are in slots `new_at` … if
        given, otherwise in the slots that hold their positions."""
        spans = None
        if self.spans is not None:
            spans = self._spans_of(held, new_at)
        return View(self.positions, held, window, q_spans=self.spans, kv_spans=spans, finite=self.exported)

    def _spans_of(self, held: Tensor, new_at: int | None) -> Tensor:
        """Spans of the slots [R, S]: those of this pass's tokens, -1 elsewhere (no span extends over two passes)."""
        assert self.spans is not None
        if new_at is not None:
            spans = torch.full_like(held, -1)
            spans[:, new_at : new_at + self.T] = self.spans
            return spans
        token = held - self.before[:, None]
        inside = (token >= 0) & (token < self.T)
        return torch.where(inside, self.spans.gather(1, token.clamp(0, self.T - 1)), -1)

    def unpacked(self, x: Tensor) -> Tensor:
        """One row per packed sequence, for recurrences and convolutions, which restart with each sequence."""
        return x if self.packing is None else self.packing.unpack(x)

    def packed(self, x: Tensor) -> Tensor:
        return x if self.packing is None else self.packing.pack(x)

    @property
    def unpacked_valid(self) -> Tensor | None:
        return self.valid if self.packing is None else self.packing.valid

    # -- the end ---------------------------------------------------------------------------------------------------

    def commit(self, accepted: CountsLike | None = None) -> None:
        """Stores each row's first `accepted` tokens (all real ones when None), advances the clock, and closes."""
        if self.cache is not None:
            self.cache._commit(self, accepted)

    def abort(self) -> None:
        """Closes without committing: the cache is as it was before the pass."""
        if self.cache is not None:
            _zero(self.cache, self.rows, self.row_index, self._written_states)
        self.close()

    def close(self) -> None:
        """Drops the tensors of the pass. A closed pass cannot be committed."""
        self.closed = True
        if self.staged is not None:
            self.staged.close()
        self._pending.clear()
        self._written_states.clear()
        if self._dropped is not None:
            self._dropped.detach()
        self._shared.clear()
        self._selections.clear()
        self._made.clear()

    def base_after(self, accepted: Tensor) -> Tensor:
        """[R] position of each row's recurrent base state after commit (layers/recurrent.py)."""
        assert self.cache is not None
        after, slack = self.before + accepted, self.cache.slack
        return torch.where(after - self.base > 2 * slack, after - slack, self.base)


def _zero(cache: Cache, rows: list[int] | None, index: Tensor, layers: list[Layer]) -> None:
    """Zeroes the states of these rows, unless commit has begun: then its change is noted, or they are not empty."""
    started = cache._change is not None or any(cache._clock.high[row] for row in rows or range(cache.rows))
    for layer in layers if not started else ():
        layer.reset(index)


def _as_slice(rows: list[int] | None) -> slice | None:
    """Consecutive rows in order as a slice, which selects a view; None for other rows."""
    if not rows or rows != list(range(rows[0], rows[0] + len(rows))):
        return None
    return slice(rows[0], rows[0] + len(rows))
