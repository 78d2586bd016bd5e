"""`OpenPass`: the pass that is open over a cache, of which nobody says where it begins or ends.

A model of transformers calls `update` once for each layer in every pass. The store opens a pass with the first such
call and commits it when every entry has been written. Until the first pass is over nobody knows which entries there
are, nor their shapes: it is kept aside (first_pass.py), and the Lamina cache is made when an entry comes for the second
time.

    pass 1      extend(0), extend(1), …       kept aside; the new tokens are all there is to see
    pass 2      extend(0)                     makes the cache, commits pass 1, opens pass 2
                extend(1), … the last         commits pass 2

A pass stays open until the next one begins if the past is recorded, since `crop` then says how many of its tokens are
kept, and if there are recurrent states, since a model may change them in place after its last call.

If all entries are plain lines on the device, passes after the first take a shorter way (lines.py). Rows are
rectangular: padding is stored like any token, and the masks of transformers hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from torch import Tensor

from lamina.bridge.first_pass import FirstPass, as_tokens
from lamina.bridge.kept import Kept, Settings, eager
from lamina.bridge.layers.in_order import extend
from lamina.bridge.layers.kinds import LayerKind
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.step import Step
from lamina.errors import InputError
from lamina.notices import notice

if TYPE_CHECKING:
    from lamina.bridge.model_facts import ModelFacts

PLANNED = (
    "on a GPU, transformers' attention over a bridge cache plans a kernel for every new length; "
    "lamina.bridge.attend(model) computes it without that"
)
RECORDED = 64  # tokens of one pass that recording makes room for, when the next pass begins without a crop


class OpenPass(Kept):
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

    # -- facts --------------------------------------------------------------------------------------------------------

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

    # -- where a pass begins ------------------------------------------------------------------------------------------

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

    def _use_lines(self) -> None:
        if not self._gives:
            super()._use_lines()

    def _leave_lines(self) -> None:
        lines = self.lines
        super()._leave_lines()
        if lines is not None:
            self._states |= {key: lines.states[key] for key in lines.begun}
            self._versions |= lines.begun

    # -- where it ends ------------------------------------------------------------------------------------------------

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

    # -- reset and fork -----------------------------------------------------------------------------------------------

    @eager
    def reset(self) -> None:
        """Empties the cache; its memory stays."""
        self._drop()
        self.note_rewritten()
        if self._inner is not None:
            self._inner.reset()
        self._length = self._tail = 0
        self._alike = [[0] * self.rows for _ in range(self.rows)]

    def fork(self) -> Self:
        new = super().fork()
        new._first, new._states, new._given, new._versions, new._handed = FirstPass(), {}, set(), {}, {}
        return new
