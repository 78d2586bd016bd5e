"""`Step`: one forward pass by PyTorch operations, opened, run, and committed or aborted.

`cache.step(T)` checks everything on the host and makes room, so a pass that cannot be done raises before anything is
written. What the pass needs is then plain tensors: `positions`, `valid`, `before`, `after`. Layers `leave` what they
cannot write yet; `commit` stores each row's accepted tokens and advances the clock. Until then the cache's lengths and
committed contents are untouched.

The same object without a cache (`Step.alone`) serves a pass that remembers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.attention.core import Backend
from lamina.attention.rotary import RopeTable, rotate, rotate_widened, widened
from lamina.attention.torch_backends import recording
from lamina.attention.view import View
from lamina.attention.window import Window
from lamina.cache.clock import on_device
from lamina.cache.counts import Counts, Numbers
from lamina.cache.layers.base import Key, Layer
from lamina.cache.memory import Memory
from lamina.cache.plain_backend import PLAIN, PlainBackend
from lamina.cache.segments import Packing
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache
    from lamina.cache.storage.prefetch import StagedPass

Layers = Sequence[Mapping[str, Layer]]


class Step:
    """One pass of T tokens over some rows. Made by `cache.step`; model code sees only `memory(i)` and `positions`."""

    backend: PlainBackend = PLAIN
    recomputes = False  # the cache keeps ids alone: see recompute.py

    def __init__(
        self,
        layers: Layers,
        T: int,
        before: Tensor,  # [R] lengths of the rows in this pass
        counts: Tensor | None,  # [R] how many of the T tokens are real; None: all
        *,
        cache: Cache | None = None,
        rows: list[int] | None = None,
        start: int | None = None,
        bound: int | None = None,
        given: Counts | None = None,
        segments: Tensor | None = None,
        spans: Tensor | None = None,
        causal: bool = True,
    ) -> None:
        device = before.device
        self.layers, self.T, self.cache = layers, T, cache
        self.before, self.counts = before, counts
        self.rows = rows  # None: every row of the cache, in order
        self.spans, self.causal = spans, causal
        self.packing = None if segments is None else Packing(segments)
        self.segments = None if self.packing is None else self.packing.segment
        self._start, self._bound = start, bound
        self._slice = _as_slice(rows)

        time = torch.arange(T, device=device)
        self.valid = None if counts is None else time < counts[:, None]  # [R, T]
        self.positions = before[:, None] + time if self.packing is None else self.packing.positions  # [R, T]
        if self.valid is not None:  # padding of a full row would be past the end of a table of positions
            self.positions = torch.where(self.valid, self.positions, 0)
        self.all_counts = torch.full_like(before, T) if counts is None else counts
        self.given = given or Counts(self.all_counts, [T] * len(before), [T] * len(before))
        self.after = before + self.all_counts
        self.real_tokens = None if counts is None else torch.minimum(time, counts[:, None] - 1)
        self.new_positions = self.positions if self.valid is None else torch.where(self.valid, self.positions, -1)
        self.row_index = torch.arange(len(before), device=device) if rows is None else on_device(rows, device)

        self.cut = False  # lines end with the slots of this pass's tokens, which are real and in all rows the same
        self.attention: str | None = None  # which backend of `lamina.attention`; None: the best that fits
        self.attended: dict[Key, tuple[Tensor, Tensor]] | None = None  # see `record_attentions`
        self.source: Any = None  # cross keys and values by layer, for a pass without a cache
        self.ids: Tensor | None = None
        self.logits: Tensor | None = None  # [R, T, vocab] or, of each row's last real token, [R, vocab]
        self.hidden: dict[int, Tensor] = {}  # [R, T, width] by layer, where the pass was asked to keep some
        self.fetched: StagedPass | None = None  # how layers come from the host, where they live there
        self.closed = False
        self.ran = False  # the whole model has run in this pass
        self.written: set[Key] = set()  # entries that have stored or left this pass's tokens, where `ran` is not said
        self.folds = False
        self.base = before
        self._left: dict[Key, Any] = {}
        self._views: dict[Hashable, View] = {}
        self._widened: tuple[RopeTable, RopeTable] | None = None
        self._shared: dict[Key, tuple[Tensor, Tensor, View]] = {}

    @classmethod
    def alone(
        cls,
        layers: Layers,
        shape: tuple[int, int],
        device: torch.device,
        counts: Tensor | None = None,
        segments: Tensor | None = None,
        spans: Tensor | None = None,
        causal: bool = True,
    ) -> Step:
        """A pass with no past, over bare layers; in an encoder's (`causal=False`) tokens also see what follows."""
        before = torch.zeros(shape[0], dtype=torch.int64, device=device)
        return cls(layers, shape[1], before, counts, start=0, segments=segments, spans=spans, causal=causal)

    # -- what model code is given ----------------------------------------------------------------------------------

    def memory(self, i: int) -> Memory:
        """What layer `i` of the model is given."""
        return Memory(self, i, self.layers[i] if self.fetched is None else self.fetched.entry(i, self))

    def has_run(self, ids: Tensor | None) -> None:
        """Notes that every block has run, over these ids."""
        self.ids, self.ran = ids, True

    def record_attentions(self) -> dict[Key, tuple[Tensor, Tensor]]:
        """What the pass will fill in, by layer and entry: how much each query takes of each slot [R, Hq, T, S], and the
        position that each slot holds [R, S], -1 where there is none."""
        self.attended = {}
        return self.attended

    # -- what layers use -------------------------------------------------------------------------------------------

    @property
    def start(self) -> int | None:
        """The length every row of this pass starts at, if the host knows that it is one and all tokens are real.

        Scattered rows cannot be had as a view, so they have no such start either. Never read while compiling: a number
        that changes from step to step would be a new graph each time.
        """
        if torch.compiler.is_compiling() or self.counts is not None or (self.rows is not None and self._slice is None):
            return None
        return self._start

    @property
    def bound(self) -> int | None:
        """No row of this pass holds more tokens than this afterwards; None while compiling."""
        return None if torch.compiler.is_compiling() else self._bound

    def take(self, tensor: Tensor) -> Tensor:
        """The rows of this pass: the tensor itself or a view where that can be."""
        if self.rows is None:
            return tensor
        return tensor[self._slice] if self._slice is not None else tensor.index_select(0, self.row_index)

    def put(self, tensor: Tensor, new: Tensor) -> None:
        """Writes the rows of this pass."""
        if self.rows is None:
            tensor.copy_(new)
        else:
            tensor.index_copy_(0, self.row_index, new.to(tensor.dtype))

    def leave(self, key: Key, what: Any) -> None:
        """Leaves something for the layer's `commit`."""
        if self.cache is not None:
            self._left[key] = what if self.fetched is None else self.fetched.leave(key, what)
            self.wrote(key)

    def wrote(self, key: Key) -> None:
        """Notes that a layer has this pass's tokens: a pass without them cannot be committed."""
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

    def attention_of(self, key: Key) -> str | Backend | None:
        """Which backend of `lamina.attention` this layer uses."""
        attended = self.attended
        if attended is None:
            return self.attention
        return recording(lambda shares, view: attended.update({key: (shares, view.kv_positions)}))

    def source_of(self, key: Key) -> dict[str, Tensor] | None:
        return None if self.source is None else self.source[key]

    def view(self, kind: Hashable, make: Callable[[], View]) -> View:
        """One View for all layers of a kind in this pass."""
        if kind not in self._views:
            self._views[kind] = make()
        return self._views[kind]

    def rotated(self, x: Tensor, rope: RopeTable) -> Tensor:
        """`rotate` x [B, H, T, D]; the widened table, which all layers need, is made once per pass."""
        if torch.compiler.is_compiling() or 2 * rope[0].shape[-1] != x.shape[-1]:
            return rotate(x, rope)
        if self._widened is None or self._widened[0] is not rope:
            self._widened = rope, widened(rope)
        return rotate_widened(x, self._widened[1])

    def view_of_new(self, window: Window) -> View:
        """This pass's tokens, seen by themselves."""
        plain = self.counts is None and self.segments is None and self.spans is None
        return View(
            self.positions, self.new_positions, window, self.causal, exact=plain,
            q_segments=self.segments, kv_segments=self.segments, q_spans=self.spans, kv_spans=self.spans,
        )  # fmt: skip

    def view_of_run(self, window: Window, first: int, end: int) -> View:
        """Positions first … end - 1 in order, of which this pass's tokens are the last."""
        held = torch.arange(first, end, device=self.before.device).expand(len(self.before), -1)
        if self.spans is not None:
            return self.view_of(window, held, new_at=end - first - self.T)
        return View(self.positions, held, window, exact=True)

    def view_of(self, window: Window, held: Tensor, new_at: int | None = None) -> View:
        """Slots that hold these positions [R, S]; this pass's tokens sit at `new_at` on, or where their position is."""
        spans = None
        if self.spans is not None:
            spans = self._spans_of(held, new_at)
        return View(self.positions, held, window, q_spans=self.spans, kv_spans=spans)

    def _spans_of(self, held: Tensor, new_at: int | None) -> Tensor:
        """Spans of the slots: those of this pass's tokens, -1 elsewhere (a span is never cut by a pass)."""
        assert self.spans is not None
        if new_at is not None:
            spans = torch.full_like(held, -1)
            spans[:, new_at : new_at + self.T] = self.spans
            return spans
        token = held - self.before[:, None]
        inside = (token >= 0) & (token < self.T)
        return torch.where(inside, self.spans.gather(1, token.clamp(0, self.T - 1)), -1)

    def unpacked(self, x: Tensor) -> Tensor:
        """Packed sequences as rows of their own, for what must restart with each of them."""
        return x if self.packing is None else self.packing.unpack(x)

    def packed(self, x: Tensor) -> Tensor:
        return x if self.packing is None else self.packing.pack(x)

    @property
    def unpacked_valid(self) -> Tensor | None:
        return self.valid if self.packing is None else self.packing.valid

    # -- the end ---------------------------------------------------------------------------------------------------

    def commit(self, accepted: Numbers | None = None) -> None:
        """Stores each row's first `accepted` tokens (all real ones when None), advances the clock, and closes."""
        if self.cache is not None:
            self.cache._commit(self, accepted)

    def abort(self) -> None:
        """Drops the pass, and closes: the cache is as it was before it."""
        self.close()

    def close(self) -> None:
        """Releases what the pass held. A closed pass cannot be committed."""
        self.closed = True
        if self.fetched is not None:
            self.fetched.close()
        self._left.clear()
        self._shared.clear()
        self._views.clear()

    def base_after(self, accepted: Tensor) -> Tensor:
        """Where the recurrent base of each row is after commit."""
        assert self.cache is not None
        after, slack = self.before + accepted, self.cache.slack
        return torch.where(after - self.base > 2 * slack, after - slack, self.base)


def _as_slice(rows: list[int] | None) -> slice | None:
    """Neighbouring rows in order can be had as a view."""
    if not rows or rows != list(range(rows[0], rows[0] + len(rows))):
        return None
    return slice(rows[0], rows[0] + len(rows))
