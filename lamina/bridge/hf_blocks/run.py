"""`Run`: one Lamina pass of a transformers model, as one call of it or several.

One call over all rows is enough where the model has attention alone and takes positions: padding and different lengths
are the View's business. A recurrent layer shows its state only after a call, and takes no padding. So then

- rows with the same number of new tokens are called together, rows that begin apart from rows that go on;
- the last `slack` tokens come one by one, so that there is a state after each, to which a row can be rewound;
- a commit of fewer tokens than were given calls the model again over those (`after`).

Where a pass takes several calls, keys and values are gathered until the last of them, and stored then.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.attention.view import View
from lamina.bridge.hf_blocks.opaque_state import OpaqueLayer
from lamina.bridge.hf_blocks.step_cache import STATE, StepCache
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key
from lamina.cache.layers.tokens import TokenLayer
from lamina.cache.step import Step
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.bridge.hf_blocks.stack import Stack

States = dict[Key, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Part:
    """One call: tokens `first` … `end` - 1 of these rows of the pass (None: all rows).

    past    tokens of its longest row before the call
    whole   the call is all of the pass
    """

    rows: Tensor | None
    first: int
    end: int
    past: int
    whole: bool = False
    begins: bool = False

    @property
    def tokens(self) -> int:
        return self.end - self.first

    def of(self, x: Tensor) -> Tensor:
        """[R, T, …] -> the rows and tokens of this call"""
        return (x if self.rows is None else x[self.rows])[:, self.first : self.end]

    def put(self, x: Tensor, new: Tensor) -> None:
        """Writes the rows and tokens of this call into x [R, T, …]."""
        if self.rows is None:
            x[:, self.first : self.end] = new
        else:
            x[self.rows, self.first : self.end] = new


class Run:
    """counts   new tokens of each row; None: those of the pass"""

    def __init__(
        self, stack: Stack, step: Step, ids: Tensor | None, embeds: Tensor, counts: list[int] | None = None
    ) -> None:
        self.stack, self.step, self.ids, self.embeds = stack, step, ids, embeds
        self.states = [(i, STATE) for i, found in enumerate(stack.layers) if STATE in found.specs]
        self.grouped = stack.grouped or bool(self.states)
        if self.grouped and step.segments is not None:
            raise InputError("packed segments need a model that takes positions and has no recurrent layers")
        if self.grouped:
            self.before: list[int] = step.before.tolist()
            self.counts: list[int] = step.all_counts.tolist() if counts is None else counts
        self.slack = 0 if step.cache is None else step.cache.slack
        self.current: States = {}  # (layer, entry) -> states [R, *shape] after the tokens so far
        self.recent: States = {}  # the same after each of the last tokens: [R, slack + 1, *shape], the newest first
        # Where the pass takes several calls:
        self._new: dict[Key, Fields] = {}  # its tokens so far, [R, *lead, T, D]
        self._coded: dict[Key, Fields] = {}  # the same as they will be read once they are stored
        self._held: dict[Key, tuple[Fields, Tensor]] = {}  # the tokens before it
        self._views: dict[Hashable, View] = {}
        self._replayed: dict[tuple[int, ...], States] = {}

    def __call__(self, store: bool = True) -> Tensor:
        """Runs the model. -> the last hidden states [R, T, W]

        store   False: only states are wanted, and nothing is written
        """
        if store:
            for key in self.states:  # before any layer leaves tokens, since commit goes in this order: see `after`
                layer = self.step.layers[key[0]][key[1]]
                assert isinstance(layer, OpaqueLayer)
                layer.leave(self.step, key, self)
        parts = [*self.parts(store)]
        if not parts:
            return torch.zeros_like(self.embeds)
        out: Tensor | None = None
        for part in parts:
            x = self._call(part)
            if part.whole:
                return x
            if out is None:
                out = x.new_zeros(*self.embeds.shape[:2], x.shape[-1])
            part.put(out, x)
        assert out is not None
        if store:
            for key, new in self._new.items():
                self.step.entries(key[0])[key[1]].extend(self.step, key, new)  # type: ignore[attr-defined]
        return out

    def parts(self, store: bool = True) -> Iterable[Part]:
        """The calls of this pass, in order."""
        step, T = self.step, self.step.T
        if not self.grouped:
            yield Part(None, 0, T, self.stack.past_of(step), whole=True)
            return
        groups: dict[tuple[int, Any], list[int]] = {}
        for row, (count, before) in enumerate(zip(self.counts, self.before, strict=True)):
            if count:
                groups.setdefault((count, before if self.stack.grouped else before == 0), []).append(row)
        device = step.before.device
        for (count, _), rows in groups.items():
            past = max(self.before[row] for row in rows)
            alone = min(self.slack, count - 1) if self.states else 0
            if self.stack.one_by_one and past:
                alone = count - 1
            ends = [*range(count - alone, count + 1)]
            self._check_spans(rows, ends[:-1])
            index = None if len(rows) == len(self.counts) else torch.tensor(rows, device=device)
            whole = store and index is None and ends == [T]
            for first, end in zip([0, *ends], ends, strict=False):
                yield Part(index, first, end, past + first, whole, begins=past == 0 and first == 0)

    def _check_spans(self, rows: list[int], cuts: list[int]) -> None:
        """Raises if tokens of one span, which see each other in both directions, would run in several calls."""
        if (spans := self.step.spans) is None:
            return
        for row in rows:
            for cut in cuts:
                if cut > 0 and spans[row, cut] >= 0 and spans[row, cut] == spans[row, cut - 1]:
                    raise InputError(
                        f"row {row} has a span at tokens {cut - 1} and {cut}, which {self.stack.name} runs in two "
                        "calls for the states of its recurrent layers: make the cache with slack=0, or leave spans out"
                    )

    def _call(self, part: Part) -> Tensor:
        states = None if part.begins or not self.states else self._states_before(part)
        cache = StepCache(self, part, states)
        ids = None if self.ids is None else part.of(self.ids)
        x = self.stack.call(ids, part.of(self.embeds), cache)
        if self.states:
            self._note(part, cache.new_states())
        return x

    # -- states ----------------------------------------------------------------------------------------------------

    def _states_before(self, part: Part) -> States:
        """Copies, since models write into them."""
        for key in self.states:
            if key not in self.current:
                layer = self.step.layers[key[0]][key[1]]
                assert isinstance(layer, OpaqueLayer)
                if layer.bare:  # rows that begin here have been called before: `current` has them
                    raise InputError(f"layer {key[0]} has no state: its rows did not begin in this pass")
                self.current[key] = layer.head(self.step)
        chosen = slice(None) if part.rows is None else part.rows
        return {key: {name: x[chosen].clone() for name, x in self.current[key].items()} for key in self.states}

    def _note(self, part: Part, states: States) -> None:
        rows = slice(None) if part.rows is None else part.rows
        R, back = len(self.step.before), self._back(part)
        for key, new in states.items():
            if key not in self.current:
                layer = self.step.layers[key[0]][key[1]]
                assert isinstance(layer, OpaqueLayer)
                begun = {name: x.new_zeros(R, *x.shape[1:]) for name, x in new.items()}
                self.current[key] = begun if layer.bare else layer.head(self.step)
            kept = self.recent.setdefault(
                key, {name: x.new_zeros(R, self.slack + 1, *x.shape[1:]) for name, x in new.items()}
            )
            for name, x in new.items():
                self.current[key][name][rows] = x
                if back <= self.slack:
                    kept[name][rows, back] = x

    def _back(self, part: Part) -> int:
        """How many tokens of its rows come after this call in the pass."""
        row = 0 if part.rows is None else int(part.rows[0])
        return self.counts[row] - part.end

    def after(self, accepted: Tensor) -> Mapping[Key, dict[str, Tensor]]:
        """The states after each row's last accepted tokens [R, slack + 1, *shape]; see `OpaqueLayer.fold`.

        Rows that accept a part of their tokens are called again over those. The first layer that is committed asks for
        this, when no layer has written anything yet.
        """
        taken = tuple(accepted.tolist())
        if taken not in self._replayed:
            again = [a if 0 < a < c else 0 for a, c in zip(taken, self.counts, strict=True)]
            self._replayed[taken] = self._again(again) if any(again) else self.recent
        return self._replayed[taken]

    def _again(self, counts: list[int]) -> States:
        other = Run(self.stack, self.step, self.ids, self.embeds, counts)
        with torch.no_grad():
            other(store=False)
        rows = torch.tensor([row for row, count in enumerate(counts) if count], device=self.step.before.device)
        merged: States = {}
        for key, known in self.recent.items():
            merged[key] = {name: x.clone() for name, x in known.items()}
            for name, x in merged[key].items():
                x[rows] = other.recent[key][name][rows]
        return merged

    # -- tokens of a pass of several calls -------------------------------------------------------------------------

    def gathered(self, part: Part, key: Key, layer: TokenLayer, new: Fields) -> tuple[Fields, View]:
        """Keeps the tokens of this call. -> all that its queries may see [rows, *lead, S, D], and the View over them"""
        step = self.step
        if step.attended is not None:
            raise InputError("attention weights cannot be recorded in a pass of several calls: give one row")
        rows, R = slice(None) if part.rows is None else part.rows, len(step.before)
        kinds = [(self._new, new)]
        if layer.coding.formats:
            kinds.append((self._coded, layer.coding.decode(layer.coding.encode(new))))
        for kept, tokens in kinds:
            if key not in kept:
                kept[key] = {n: x.new_zeros(R, *x.shape[1:-2], step.T, x.shape[-1]) for n, x in tokens.items()}
            for name, x in tokens.items():
                kept[key][name][rows, ..., part.first : part.end, :] = x
        seen = {name: x[rows, ..., : part.end, :] for name, x in kinds[-1][0][key].items()}
        positions = step.positions[rows]
        kv = positions[:, : part.end]
        if not layer.bare:
            tokens, held = self._tokens_before(key, layer)
            slots = held.shape[1] if layer.layout.ring is not None else part.past - part.first
            seen = {name: torch.cat([tokens[name][rows, ..., :slots, :], x], dim=-2) for name, x in seen.items()}
            kv = torch.cat([held[rows, :slots], kv], dim=1)
        kind = (part, layer.window, layer.layout, layer.bare)
        if kind not in self._views:
            q_spans = kv_spans = None
            if step.spans is not None:
                own = step.spans[rows][:, : part.end]
                before = own.new_full((len(own), kv.shape[1] - own.shape[1]), -1)
                q_spans, kv_spans = own[:, part.first :], torch.cat([before, own], dim=1)
            q_positions = positions[:, part.first : part.end]
            self._views[kind] = View(q_positions, kv, layer.window, q_spans=q_spans, kv_spans=kv_spans)
        return seen, self._views[kind]

    def _tokens_before(self, key: Key, layer: TokenLayer) -> tuple[Fields, Tensor]:
        """The tokens before this pass, and their positions: see `TokenLayer.held`."""
        if key not in self._held:
            tokens, held = layer.held(self.step, max(self.before))
            if self.step.staged is not None:  # the staging buffer will hold another layer before the next call
                tokens = {name: x.clone() for name, x in tokens.items()}
            self._held[key] = tokens, held
        return self._held[key]
