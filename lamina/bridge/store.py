"""`Store`: one Lamina cache, filled by calls that come layer by layer and never say where a pass begins or ends.

A model of transformers calls `update` once for each layer in every pass. The store opens a pass with the first such
call and commits it when every entry has been written. Until the first pass is over nobody knows which entries there
are, nor their shapes: it is kept aside (first_pass.py), and the Lamina cache is made when an entry comes for the second
time.

    pass 1      extend(0), extend(1), …       kept aside; the new tokens are all there is to see
    pass 2      extend(0)                     makes the cache, commits pass 1, opens pass 2
                extend(1), … the last         commits pass 2

A pass stays open until the next one begins if the past is recorded, since `crop` then says how many of its tokens are
kept, and if there are recurrent states, since a model may change them in place after its last call.

Rows are rectangular: padding is stored like any token, and the masks of transformers hide it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lamina.bridge.first_pass import FirstPass, as_columns, as_tokens, last_columns, tokens_of
from lamina.bridge.in_order import extend, joined, runs
from lamina.bridge.kinds import LayerKind
from lamina.bridge.specs import Attention, Columns, State
from lamina.bridge.states import StateLayer
from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codecs, codecs_of
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key, Layer
from lamina.cache.layers.cross import CrossLayer
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.ops.join import join
from lamina.cache.spec import Spec
from lamina.cache.step import Step
from lamina.errors import InputError
from lamina.notices import notice

RECORDED = 64  # tokens of one pass that recording makes room for, when the next pass begins without a crop


@dataclass(frozen=True)
class Settings:
    """How the user wants the cache stored: see `lamina.bridge.Cache`."""

    capacity: int | None = None
    codec: Codecs | None = None
    residence: str = "device"
    slack: int = 0


class Store:
    """See the top of the file."""

    def __init__(self, kinds: Sequence[LayerKind], settings: Settings, model: Any = None) -> None:
        self.kinds, self.settings, self.model = kinds, settings, model
        self.codecs = codecs_of(
            settings.codec, [{"attention": Attention(1, 1, 1)} if kind.attends else {} for kind in kinds]
        )
        self.slack, self.recording = settings.slack, False
        self.specs: dict[Key, Spec] = {}
        self.device: torch.device | None = None  # where passes run; None before anything is stored
        self.rows = 0
        self._first = FirstPass()
        self._inner: Cache | None = None
        self._known: frozenset[Key] = frozenset()  # every entry that a pass writes, once the first pass is over
        self._step: Step | None = None
        self._states: dict[Key, Tensor] = {}  # states that the open pass was given, or may have changed
        self._given: set[Key] = set()  # those of `_states` that were given
        self._handed: dict[Key, Tensor] = {}  # last inputs of convolutions that the model asked for
        self._length = 0  # tokens of each row that are committed
        self._tail = 0  # of these, tokens since the last crop, while recording
        self._alike: list[list[int]] = []  # [B, B] how many leading tokens two rows certainly have in common

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def inner(self) -> Cache:
        """The Lamina cache, with all passes committed."""
        self.finish()
        if self._inner is None:
            raise InputError("nothing is stored in this cache yet: run the model over it first")
        return self._inner

    @property
    def empty(self) -> bool:
        """True if nothing was stored yet, so that not even the shapes are known."""
        return self._inner is None and not self._first

    @property
    def length(self) -> int:
        """Tokens of each row, those of a complete open pass too."""
        if self._first:
            return self._first.T
        return self._length + (self._step.T if self._step is not None and self._complete else 0)

    @property
    def _complete(self) -> bool:
        """True if every entry has been written in the open pass."""
        done = self._states.keys() | self._handed.keys() | (set() if self._step is None else self._step.written)
        return self._known <= done

    @property
    def has_states(self) -> bool:
        """True if some layer has a state that the model computes; unknown before the first pass has ended."""
        return any(isinstance(spec, State) for spec in self.specs.values())

    def length_of(self, key: Key) -> int:
        """Tokens that an entry holds."""
        if key in self._first.tokens:
            return tokens_of(self._first.tokens[key])
        if key in self._first:
            return self._first.T
        if self._step is not None and (key in self._step.written or key in self._given):
            return self._length + self._step.T
        return self._length

    def holds(self, key: Key) -> bool:
        """True if something was stored for this entry, or memory was allocated for it."""
        return key in self._first or (self._inner is not None and key in self.specs)

    def layer(self, key: Key) -> Layer:
        """The layer of an entry; that on the device, if a pass is open over a cache on the host."""
        assert self._inner is not None
        step = self._step
        entry = self._inner.layers[key[0]] if step is None or step.staged is None else step.staged.entry(key[0], step)
        return entry[key[1]]

    # -- a pass ----------------------------------------------------------------------------------------------------

    def extend(self, key: Key, spec: Spec, new: Fields) -> Fields:
        """Appends tokens [B, *lead, T, D] to an entry. -> the fields of all tokens that their queries may see"""
        stored, T = _detached(new), tokens_of(new)
        if key not in self._known:
            if self._is_first(key):
                found = self._first.add_tokens(key, spec, self.codecs[key[0]], stored)
                return found if self._first.codings[key].formats else new
            return self.extend(key, spec, new)
        step = self._step
        if step is None or key in step.written:
            step = self._begin(T, next(iter(new.values())))
        elif T != step.T:
            raise InputError(
                f"layer {key[0]} was given {T} tokens in a pass of {step.T}: all layers get the same tokens"
            )
        layer = self.layer(key)
        assert isinstance(layer, TokenLayer)
        found = extend(layer, step, key, self._length, layer.coding.encode(stored))
        self._commit_if_over()
        return layer.coding.decode(found)

    def _is_first(self, key: Key) -> bool:
        """True if this entry is written in the first pass; if that has ended with this call, it is committed."""
        if key in self._first:
            self.finish()
            return False
        if self._known and self._length:
            raise InputError(
                f"layer {key[0]} ({key[1]}) is used for the first time after {self._length} tokens: the first pass "
                "over a cache must run through all layers"
            )
        if self._known:  # memory was allocated, or the cache was emptied, and the model has more entries
            self._step, self._inner, self._known = None, None, frozenset()
        return True

    def _begin(self, T: int, x: Tensor) -> Step:
        """Opens a pass of T tokens; the one that is open is committed."""
        if self._step is not None:
            self.finish()
        assert self._inner is not None
        if len(x) != self.rows:
            if self._length:
                raise InputError(
                    f"this cache holds {self.rows} rows of {self._length} tokens, and {len(x)} rows were given: repeat "
                    "or select its rows first, or reset it"
                )
            self._build(len(x), x.dtype, x.device)
        if self.recording:
            self._make_slack(self._tail + min(T, RECORDED))
        self._step = self._inner.step(T)
        return self._step

    def columns(self, key: Key, new: Tensor, kernel: int) -> Tensor:
        """Appends inputs [B, *lead, T] of a convolution; -> those and up to `kernel` before them"""
        new = _detached({"x": new})["x"]
        if key not in self._known:
            if self._is_first(key):
                return self._first.add_columns(key, new, kernel)
            return self.columns(key, new, kernel)
        spec = self.specs[key]
        if isinstance(spec, Columns):
            return as_columns(self.extend(key, spec, {"x": as_tokens(new)})["x"], spec.lead)
        before = self.state(key)
        both = new if before is None else torch.cat([before, new], dim=-1)
        self.set_state(key, last_columns(both, kernel).contiguous())
        return both

    def last_columns(self, key: Key, kernel: int) -> Tensor | None:
        """The last inputs [B, *lead, kernel] of a convolution, with zeros before the first; None if there are none."""
        self._finish_if_asked_again(key)
        if key in self._first.columns:
            return last_columns(self._first.columns[key][0], kernel)
        if key not in self._known or not self.length_of(key):
            return None
        spec = self.specs[key]
        if not isinstance(spec, Columns):
            return self.state(key)
        found = self.read(key, kernel)
        if found is not None:
            self._handed[key] = last_columns(as_columns(found["x"], spec.lead), kernel).clone()
        return self._handed.get(key)

    def _store_changed_columns(self) -> None:
        """Stores the inputs of convolutions that a model, in a pass of one token, wrote into their state itself."""
        step = self._step
        assert step is not None
        for key in self._known - step.written - self._states.keys():
            if step.T > 1:
                raise InputError(
                    f"layer {key[0]} changed its convolution state in a pass of {step.T} tokens without saying how"
                )
            layer = self.layer(key)
            assert isinstance(layer, TokenLayer)
            extend(layer, step, key, self._length, {"x": as_tokens(self._handed[key][..., -1:])})

    def state(self, key: Key) -> Tensor | None:
        """The state of an entry, None if there is none. The model may change it in place, as a part of its next pass."""
        self._finish_if_asked_again(key)
        if key in self._first.states:
            return self._first.states[key]
        if key in self._states:
            return self._states[key]
        if key not in self._known or not self._length:
            return None
        layer = self.layer(key)
        assert isinstance(layer, StateLayer)
        self._states[key] = layer.live()
        return self._states[key]

    def set_state(self, key: Key, new: Tensor) -> Tensor:
        """Replaces the state of an entry, as a part of the pass."""
        new = _detached({"x": new})["x"]
        if key not in self._known and self._is_first(key):
            return self._first.add_state(key, new)
        if key in self._given:
            self.finish()
        self._states[key] = new
        self._given.add(key)
        return new

    def _finish_if_asked_again(self, key: Key) -> None:
        """A model asks for a state before it gives a new one: if all layers have given theirs, a new pass begins."""
        remembering = {i for i, kind in enumerate(self.kinds) if kind.remembers}
        if self._first.layers >= remembering if key in self._first else self._step is not None and self._complete:
            self.finish()

    # -- the end of a pass -----------------------------------------------------------------------------------------

    def _commit_if_over(self) -> None:
        step = self._step
        if step is not None and len(step.written) == len(self._known) and not self.recording:
            self._commit()

    def finish(self) -> None:
        """Commits the pass that is open, if any."""
        if self._first:
            self._finish_first()
        elif self._step is not None:
            if not self._complete:
                missing = sorted(self._known - self._step.written - self._states.keys() - self._handed.keys())
                shown = ", ".join(f"{i} ({name})" for i, name in missing[:4])
                raise InputError(
                    f"a pass of {self._step.T} tokens ended before layer {shown} was updated, so it is not stored: "
                    "drop it with cache.abort(), then run it again"
                )
            self._commit()
        elif self._given:  # a model without attention and convolutions: each pass counts as one token
            assert self._inner is not None
            self._step = self._inner.step(1)
            self._commit()
        self._forget()  # states that somebody asked for between passes

    def _forget(self) -> None:
        self._states.clear()
        self._given.clear()
        self._handed.clear()

    def abort(self) -> None:
        """Drops the pass that is open, if any: the cache is as it was before it."""
        if self._step is not None:
            self._step.abort()
        self._step, self._first = None, FirstPass()
        self._forget()

    def _commit(self, accepted: int | None = None) -> None:
        step = self._step
        assert step is not None
        taken = step.T if accepted is None else accepted
        for key, state in self._states.items():
            step.leave(key, state)
        if self._handed:
            self._store_changed_columns()
        if taken:
            step.commit(None if accepted is None else [taken] * self.rows)
        else:
            step.abort()
        self._step = None
        self._forget()
        self._length += taken
        self._tail = self._tail + min(taken, RECORDED) if self.recording and accepted is None else 0

    def _finish_first(self) -> None:
        """Makes the Lamina cache and commits the first pass to it."""
        first, self._first = self._first, FirstPass()
        T, like = first.settle(), first.like
        assert like is not None
        self.specs |= first.specs
        if self.recording:
            self.slack = max(self.slack, min(T, RECORDED))
        self._build(len(like), like.dtype, like.device)
        assert self._inner is not None
        for key, source in first.sources.items():
            self.attach(key, source)
        if not first.tokens and not first.states:
            return
        if self.settings.capacity is None:
            self._inner.reserve(T + T // 8 + 64)
        self._step = step = self._inner.step(T)
        for key in list(first.tokens):
            layer = self.layer(key)
            assert isinstance(layer, TokenLayer)
            extend(layer, step, key, 0, first.tokens.pop(key))
        self._states |= first.states
        self._commit()

    # -- the cache -------------------------------------------------------------------------------------------------

    def _build(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the Lamina cache for the entries that are known, with nothing in it."""
        listed: list[dict[str, Spec]] = [{} for _ in self.kinds]
        for (i, name), spec in sorted(self.specs.items()):
            listed[i][name] = spec
        settings = self.settings
        self._inner = Cache(
            listed, rows=rows, capacity=settings.capacity, slack=self.slack, dtype=dtype, device=device,
            codec={i: codec for i, codec in enumerate(self.codecs) if self.kinds[i].attends}, residence=settings.residence, model=self.model,
        )  # fmt: skip
        self._known = frozenset(key for key, spec in self.specs.items() if not spec.reads_source)
        self.rows, self.device = rows, device
        self._alike = [[0] * rows for _ in range(rows)]

    def prepare(self, specs: Mapping[Key, Spec], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Makes the Lamina cache now, for entries of these specs; nothing may be stored yet."""
        self.specs |= specs
        self._build(rows, dtype, device)

    def set_source(self, key: Key, spec: Spec, source: Fields) -> Fields:
        """Replaces the keys and values [B, H, S, D] of an encoder's output; -> the same as attention sees them"""
        source = _detached(source)
        if self._inner is not None and key in self.specs:
            self.attach(key, source)
        else:
            self._first.add_source(key, spec, source)
        return source

    def attach(self, key: Key, source: Fields) -> None:
        """Stores keys and values [B, H, S, D] of an encoder's output."""
        assert self._inner is not None
        layer = self._inner.layers[key[0]][key[1]]
        assert isinstance(layer, CrossLayer)
        rows, S = source["k"].shape[0], source["k"].shape[-2]
        lengths = torch.full((rows,), S, device=self.device)
        layer.attach(source["k"], source["v"], lengths, torch.arange(rows, device=self.device))
        self._inner.clock.note_sources(range(rows))

    def _make_slack(self, needed: int) -> None:
        """Enlarges rings so that `needed` tokens can be dropped after they are committed."""
        cache = self._inner
        assert cache is not None
        if needed > self.slack and any(layer.layout is not None and layer.layout.ring for layer in cache.every_layer()):
            self.slack = max(needed, 2 * self.slack)
            self._inner = join([cache], slack=self.slack)

    # -- verbs -----------------------------------------------------------------------------------------------------

    def crop(self, n: int) -> None:
        """Drops the last n tokens of every row."""
        n = min(n, self.length)
        if self._first or self._states:
            self.finish()
        if self._step is not None and self._complete:
            kept = max(self._step.T - n, 0)
            n -= self._step.T - kept
            self._commit(kept)
        self.finish()
        if n:
            assert self._inner is not None
            if n == self._length:
                self._clear()
            else:
                self._inner.rewind(n)
            self._length -= n
            self._alike = [[min(one, self._length) for one in row] for row in self._alike]
        self._tail = 0

    def _clear(self) -> None:
        """Drops every token; sources stay attached."""
        assert self._inner is not None
        cache = self._inner
        cross = [layer for layer in cache.every_layer() if isinstance(layer, CrossLayer)]
        lengths = [layer.data["lengths"].clone() for layer in cross]
        cache.reset()
        for layer, held in zip(cross, lengths, strict=True):
            layer.data["lengths"].copy_(held)
        if cross:
            cache.clock.note_sources(range(cache.rows))

    def reset(self) -> None:
        """Empties the cache; its memory stays."""
        self.abort()
        if self._inner is not None:
            self._inner.reset()
        self._length = self._tail = 0

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was."""
        if self.empty:
            return
        cache, alike = self.inner, self._alike
        cache.reorder(rows, since=[alike[i][source] for i, source in enumerate(rows)])
        self._alike = [[self._length if a == b else alike[a][b] for b in rows] for a in rows]

    def select(self, rows: Sequence[int]) -> None:
        """Replaces the cache by one of these rows, in this order."""
        if self.empty:
            return
        cache, alike = self.inner, self._alike
        self._inner, self.rows = cache.select(rows), len(rows)
        self._alike = [[self._length if a == b else alike[a][b] for b in rows] for a in rows]

    def fork(self) -> Store:
        """An independent copy."""
        self.finish()
        new = object.__new__(Store)
        new.__dict__.update(self.__dict__)
        new.specs, new._first = dict(self.specs), FirstPass()
        new._states, new._given, new._handed = {}, set(), {}
        new._alike = [list(row) for row in self._alike]
        new._inner = None if self._inner is None else self._inner.fork()
        return new

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, key: Key, last: int | None = None) -> Fields | None:
        """The last tokens of an entry in order [B, *lead, N, D], all when None; None if nothing is stored."""
        if key in self._first.tokens:
            found = self._first.codings[key].decode(self._first.tokens[key])
            first = 0 if last is None else max(0, tokens_of(found) - last)
            return {name: x[..., first:, :] for name, x in found.items()}
        if key not in self._known or not (end := self.length_of(key)):
            return None
        assert self._inner is not None
        step, first = self._step, 0 if last is None else max(0, end - last)
        layer = self._inner.layers[key[0]][key[1]]
        assert isinstance(layer, TokenLayer)
        if step is None:
            step = Step(self._inner.layers, 1, self._inner.clock.lengths, None)
        pending = step._pending.get(key)  # tokens of the open pass that a ring stores at commit
        pieces = runs(layer, step, first, end if pending is None else min(self._length, end))
        pieces = [{name: layer.storage.to_device(x) for name, x in piece.items()} for piece in pieces]
        if pending is not None:
            behind = max(0, first - self._length)
            pieces.append({name: x[..., behind:, :] for name, x in pending.items()})
        return layer.coding.decode(joined(pieces))

    def source(self, key: Key) -> Fields | None:
        """Keys and values of an encoder's output; None if there is none."""
        if key in self._first.sources:
            return self._first.sources[key]
        if self._inner is None or key not in self.specs:
            return None
        layer = self.layer(key)
        assert isinstance(layer, CrossLayer)
        if not layer.slots or not self._inner.clock.sourced[0]:
            return None
        return layer.coding.decode(layer.parts)


def _detached(fields: Fields) -> Fields:
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in fields.values()):
        return fields
    notice("lamina.bridge stores keys and values without their gradients: a backward pass does not reach the history")
    return {name: x.detach() for name, x in fields.items()}
