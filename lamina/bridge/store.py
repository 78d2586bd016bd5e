"""`Store`: one Lamina cache, filled by calls that come layer by layer (open_pass.py): what a model calls in each layer,
and the verbs of transformers that may find a pass open."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.bridge.first_pass import as_columns, as_tokens, last_columns, tokens_of
from lamina.bridge.kept import detached, eager
from lamina.bridge.layers.in_order import append, extend
from lamina.bridge.layers.specs import Columns
from lamina.bridge.layers.states import StateLayer
from lamina.bridge.layers.stored import Stored, Tokens, is_dense
from lamina.bridge.open_pass import OpenPass
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.spec import Spec
from lamina.errors import InputError
from lamina.notices import notice

DENSE = (
    "a bridge cache with a codec, in a pool or on the host gives its model a dense copy of the history for each token; "
    "lamina.bridge.attend(model) has attention read the store itself"
)


class Store(OpenPass):
    """See the top of the file."""

    # -- tokens -------------------------------------------------------------------------------------------------------

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
        elif (rows := len(next(iter(new.values())))) != self.rows:
            raise InputError(
                f"layer {key[0]} was given {rows} rows in a pass of {self.rows}: all layers get the same rows"
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

    # -- states -------------------------------------------------------------------------------------------------------

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

    # -- an encoder's output ------------------------------------------------------------------------------------------

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

    # -- verbs --------------------------------------------------------------------------------------------------------

    @eager
    def crop(self, n: int) -> None:
        """Drops the last n tokens of every row."""
        n = min(n, self.length)
        if self.lines is not None and self.lines.crop(n, self._length):
            self.note_rewritten()
            return
        if self._first or self._states:
            self.finish()
        if self._step is not None and self._complete:
            kept = max(self._step.T - n, 0)
            n -= self._step.T - kept
            self.note_rewritten()
            self._commit(kept)
        self.finish()
        self.rewind(n)
        self._tail = 0
