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

If all entries are plain lines on the device, passes after the first take a shorter way (lines.py).

Rows are rectangular: padding is stored like any token, and the masks of transformers hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from lamina.bridge.first_pass import FirstPass, as_columns, as_tokens, last_columns, tokens_of
from lamina.bridge.kept import Kept, Settings, detached, eager
from lamina.bridge.layers.in_order import append, extend
from lamina.bridge.layers.kinds import LayerKind
from lamina.bridge.layers.specs import Columns
from lamina.bridge.layers.states import StateLayer
from lamina.bridge.layers.stored import Stored, Tokens, is_dense
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.spec import Spec
from lamina.cache.step import Step
from lamina.errors import InputError
from lamina.notices import notice

if TYPE_CHECKING:
    from lamina.bridge.model_facts import ModelFacts

DENSE = (
    "a bridge cache with a codec, in a pool or on the host gives its model a dense copy of the history for each token; "
    "lamina.bridge.attend(model) has attention read the store itself"
)
PLANNED = (
    "on a GPU, transformers' attention over a bridge cache plans a kernel for every new length; "
    "lamina.bridge.attend(model) computes it without that"
)
RECORDED = 64  # tokens of one pass that recording makes room for, when the next pass begins without a crop


class Store(Kept):
    """See the top of the file."""

    def __init__(self, kinds: Sequence[LayerKind], settings: Settings, model: ModelFacts) -> None:
        super().__init__(kinds, settings, model)
        self._first = FirstPass()
        self._states: dict[Key, Tensor] = {}  # states that the open pass was given, or may have changed
        self._given: set[Key] = set()  # those of `_states` that were given
        self._versions: dict[Key, int] = {}  # how often others had been changed when the model got them
        self._handed: dict[Key, Tensor] = {}  # last inputs of convolutions that the model asked for
        self._gives = False  # True if the model, in passes of one token, gives states instead of changing them in place
        self._tail = 0  # committed tokens since the last crop, while recording

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """True if nothing was stored yet, so that not even the shapes are known."""
        return self._inner is None and not self._first

    @property
    def length(self) -> int:
        """Tokens of each row, those of a complete open pass too."""
        if self.lines is not None:
            return self.lines.length
        if self._first:
            return self._first.T
        return self._length + (self._step.T if self._step is not None and self._complete else 0)

    @property
    def _complete(self) -> bool:
        """True if every entry has been written in the open pass."""
        written = set() if self._step is None else self._step.written
        if len(written) + len(self._states) + len(self._handed) < len(self._known):
            return False
        return self._known <= self._states.keys() | self._handed.keys() | written

    def length_of(self, key: Key) -> int:
        if self.lines is not None:
            return self.lines.length_of(key)
        if key in self._first:
            return self._first.T
        if self._step is not None and key in self._given:
            return self._length + self._step.T
        return super().length_of(key)

    def holds(self, key: Key) -> bool:
        """True if something was stored for this entry, or memory was allocated for it."""
        return key in self._first or key in self.specs

    def read(self, key: Key, last: int | None = None) -> Fields | None:
        return self._first.read(key, last) if key in self._first else super().read(key, last)

    def source(self, key: Key) -> Fields | None:
        return self._first.source(key) if key in self._first else super().source(key)

    # -- tokens ----------------------------------------------------------------------------------------------------

    @eager
    def extend(self, key: Key, one: Spec, new: Fields) -> Fields:
        """Appends tokens [B, *lead, T, D] to an entry. -> the fields of all tokens that their queries may see; `Stored`
        ones if a dense copy would be made and the model reads the store itself"""
        self._leave_lines()
        stored, T = detached(new), tokens_of(new)
        if key not in self._known:
            if not self._is_first(key):
                return self.extend(key, one, new)
            found = self._first.add_tokens(key, one, self.codecs[key[0]], stored)
            return found if self._first.codings[key].formats else new
        step = self._step
        if step is None or key in step.written:
            step = self._begin(T, next(iter(new.values())))
        elif T != step.T:
            raise InputError(
                f"layer {key[0]} was given {T} tokens in a pass of {step.T}: all layers get the same tokens"
            )
        layer = self.layer(key)
        assert isinstance(layer, TokenLayer)
        parts = layer.coding.encode(stored)
        if key[1] == "attention" and not is_dense(layer):
            if self.model.attended:  # the pass stays open: a commit would overwrite what it is still to read
                append(layer, step, key, self._length, parts)
                tokens = Tokens(layer, step, self._length, parts)
                return {name: Stored.of(tokens, name, x) for name, x in new.items()}
            notice(DENSE, unexpected=True)
        found = extend(layer, step, key, self._length, parts)
        in_place = 0 if self._given or not self._flat_by_one else len(self._states)  # as `lines` hands them out
        if len(step.written) + in_place == len(self._known) and (self._flat or not self.recording):
            self._commit()
            self._use_lines()
        return layer.coding.decode(found)

    def _is_first(self, key: Key) -> bool:
        """True if this entry is written in the first pass; if that has ended with this call, it is committed."""
        self._leave_lines()
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
            self.make_slack(self._tail + min(T, RECORDED))
        self._step = self._inner.step(T)
        return self._step

    # -- states ----------------------------------------------------------------------------------------------------

    @eager
    def columns(self, key: Key, new: Tensor, kernel: int) -> Tensor:
        """Appends inputs [B, *lead, T] of a convolution; -> those and up to `kernel` before them"""
        new = detached({"x": new})["x"]
        if key not in self._known:
            if not self._is_first(key):
                return self.columns(key, new, kernel)
            return self._first.add_columns(key, new, kernel)
        spec = self.specs[key]
        if isinstance(spec, Columns):
            return as_columns(self.extend(key, spec, {"x": as_tokens(new)})["x"], spec.lead)
        self._leave_lines()
        if self._step is not None and new.shape[-1] != self._step.T and self._complete:
            self.finish()  # the model changed all states of the last pass in place, and asks for none in this one
        # A state that was asked for in this pass is not asked for again: that would begin the next pass.
        before = self._states[key] if key in self._states else self.state(key)
        both = new if before is None else torch.cat([before, new], dim=-1)
        self.set_state(key, last_columns(both, kernel).contiguous())
        return both

    @eager
    def last_columns(self, key: Key, kernel: int) -> Tensor | None:
        """The last inputs [B, *lead, kernel] of a convolution, with zeros before the first; None if there are none.
        The model may write those of its next pass, of one token, into them."""
        if self.lines is not None and (state := self.lines.state(key)) is not None:
            return state
        self._finish_if_asked_again(key)
        if key in self._first.columns:
            return last_columns(self._first.columns[key][0], kernel)
        if key not in self._known or not self.length_of(key):
            return None
        spec = self.specs[key]
        if not isinstance(spec, Columns):
            return self.state(key)
        found = self.read(key, kernel)
        assert found is not None
        self._handed[key] = last_columns(as_columns(found["x"], spec.lead), kernel).clone()
        return self._handed[key]

    def _store_changed_columns(self) -> None:
        """Stores the inputs of convolutions that a model, in a pass of one token, wrote into their state itself."""
        step = self._step
        assert step is not None
        for key in self._known - step.written - self._states.keys():
            if step.T > 1:
                raise InputError(
                    f"layer {key[0]} changed its convolution state in a pass of {step.T} tokens without giving them"
                )
            layer = self.layer(key)
            assert isinstance(layer, TokenLayer)
            extend(layer, step, key, self._length, {"x": as_tokens(self._handed[key][..., -1:])})

    @eager
    def state(self, key: Key) -> Tensor | None:
        """The state of an entry, None if there is none. The model may change it in place in its next pass."""
        if self.lines is not None and (state := self.lines.state(key)) is not None:
            return state
        self._finish_if_asked_again(key)
        if key in self._first.states:
            return self._first.states[key]
        if self.lines is not None:
            return self.lines.state(key)
        if key in self._states:
            return self._states[key]
        if key not in self._known or not self._length:
            return None
        layer = self.layer(key)
        assert isinstance(layer, StateLayer)
        self._states[key] = state = layer.live()
        if state is layer.data["state"]:  # and not a copy, which inference mode may not count changes of
            self._versions[key] = state._version
        return state

    @eager
    def set_state(self, key: Key, new: Tensor) -> Tensor:
        """Replaces the state of an entry, as a part of the pass."""
        new = detached({"x": new})["x"]
        if key not in self._known and self._is_first(key):
            return self._first.add_state(key, new)
        if self.lines is not None and self.lines.wrote_all:  # the tokens of this pass are counted
            self._gives = True
            return self.lines.states[key].copy_(new)
        self._leave_lines()
        if key in self._given:
            self.finish()
        self._states[key] = new
        self._given.add(key)
        return new

    def _finish_if_asked_again(self, key: Key) -> None:
        """A model asks for a state before it gives a new one: if all layers have given theirs, a new pass begins."""
        if key in self._first:
            over = self._first.layers >= {i for i, kind in enumerate(self.kinds) if kind.remembers}
        else:
            over = self._step is not None and self._complete
        if over:
            self.finish()
            if self.has_states and self._length:
                self._use_lines()

    # -- passes over plain lines -----------------------------------------------------------------------------------

    def _use_lines(self) -> None:
        if not self._gives:
            super()._use_lines()

    def _leave_lines(self) -> None:
        lines = self.lines
        super()._leave_lines()
        if lines is not None:
            self._states |= {key: lines.states[key] for key in lines.begun}
            self._versions |= lines.begun

    # -- the end of a pass -----------------------------------------------------------------------------------------

    @eager
    def finish(self) -> None:
        self._leave_lines()
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
        self._versions.clear()
        self._given.clear()
        self._handed.clear()

    @eager
    def abort(self) -> None:
        """Drops a pass that ended before all layers were given its tokens: the cache is as it was before it. If the
        model has changed states in place, it cannot be: the cache is emptied, and an error says so."""
        self._leave_lines()
        if self._is_over():
            self.finish()
        changed = self._changed_in_place()
        self._drop()
        if changed:
            i, name = min(changed)
            self.reset()
            raise InputError(
                f"the dropped pass may have changed {len(changed)} states in place, that of layer {i} ({name}) "
                "among them, so the cache was emptied: feed its tokens again. A cache with slack=1, or with "
                'residence="host", has models change copies of its states, and can drop such a pass'
            )

    def _changed_in_place(self) -> list[Key]:
        """Stored states that the open pass may have changed. PyTorch counts changes, but not those by other kernels,
        which there are on a GPU."""
        if self._inner is None or (self._step is not None and self._step.T > 1):  # of several tokens, they are given
            return []
        return [
            (i, name)
            for (i, name), state in self._states.items()
            if (i, name) not in self._given
            and self._inner.layers[i][name].data["state"] is state
            and (state.is_cuda or state._version != self._versions.get((i, name)))
        ]

    def _is_over(self) -> bool:
        """True if the last layer has stored what it had to in the open pass. A layer that changes its states in place
        does not tell when it has."""
        if self._first:
            return self._first.is_whole(self.kinds)
        stored = self._given | (set() if self._step is None else self._step.written)
        last = max(self._known, default=None)
        return last is not None and any(i == last[0] for i, _ in stored) and self._complete

    def _drop(self) -> None:
        self._leave_lines()
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
        if step.T == 1:
            self._gives = bool(self._given)
        if self._states or self._handed:
            self._forget()
        self._length += taken
        self._tail = self._tail + min(taken, RECORDED) if self.recording and accepted is None else 0

    def _finish_first(self) -> None:
        """Makes the Lamina cache and commits the first pass to it."""
        first, self._first = self._first, FirstPass()
        T, like = first.settle(droppable=self.recording or self.slack > 0), first.like
        assert like is not None
        self.specs |= first.specs
        if self.recording:
            self.slack = max(self.slack, min(T, RECORDED))
        self._build(len(like), like.dtype, like.device)
        if like.is_cuda and self.settings.capacity is not None and not self.model.attended:
            notice(PLANNED)  # a static cache of transformers always has the same length
        assert self._inner is not None
        for key, source in first.sources.items():
            self.attach(key, source)
        if not first.tokens and not first.states:
            return
        stored: set[Key] = set()
        if self.settings.capacity is None:
            room = T + T // 8 + 64
            stored = first.move_to_lines(self._inner, room) if self._flat else stored
            self._inner.reserve(room)
        self._step = step = self._inner.step(T)
        step.written |= stored
        for key in list(first.tokens):
            layer = self.layer(key)
            assert isinstance(layer, TokenLayer)
            extend(layer, step, key, 0, first.tokens.pop(key))
        self._states |= first.states
        self._commit()

    @eager
    def set_source(self, key: Key, spec: Spec, source: Fields) -> Fields:
        """Replaces the keys and values [B, H, S, D] of an encoder's output; -> the same as attention sees them"""
        source = detached(source)
        if self._inner is not None and key in self.specs:
            self.attach(key, source)
            found = self.source(key)
            assert found is not None
            return found
        if self._known:
            raise InputError(
                f"layer {key[0]} is given an encoder's output for the first time after the first pass over this cache: "
                "make a new cache"
            )
        return self._first.add_source(key, spec, self.codecs[key[0]], source)

    # -- verbs -----------------------------------------------------------------------------------------------------

    @eager
    def crop(self, n: int) -> None:
        """Drops the last n tokens of every row."""
        n = min(n, self.length)
        if self.lines is not None and self.lines.crop(n, self._length):
            return
        if self._first or self._states:
            self.finish()
        if self._step is not None and self._complete:
            kept = max(self._step.T - n, 0)
            n -= self._step.T - kept
            self._commit(kept)
        self.finish()
        self.rewind(n)
        self._tail = 0

    @eager
    def reset(self) -> None:
        """Empties the cache; its memory stays."""
        self._drop()
        if self._inner is not None:
            self._inner.reset()
        self._length = self._tail = 0
        self._alike = [[0] * self.rows for _ in range(self.rows)]

    def fork(self) -> Self:
        new = super().fork()
        new._first, new._states, new._given, new._versions, new._handed = FirstPass(), {}, set(), {}, {}
        return new
