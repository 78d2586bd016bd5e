"""`TokenLayer`: what a pass reads from a store with one slot per token, and what it writes there.

A line is written in place, since slots past a row's length are unused. A ring is written in place by a pass of one
token: the slot it overwrites holds a token that neither this query nor any rewind within the slack can see. In a pass
of several tokens, these attend over the ring and over each other, and commit writes those that are accepted. Only the
slots that a pass reads are dequantized.

Padding is never stored. In a pass with padding, each padding token writes the values of the row's last real token to
that token's slot: the slot is written several times with the same values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.attention.view import View
from lamina.attention.window import Sliding
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key
from lamina.cache.layers.newest import (
    Newest,
    NewestRun,
    by_token,
    gather_tokens,
    last_run,
    newest_of_packed,
    newest_tokens,
    only_newest,
)
from lamina.cache.layers.token_store import TokenStore
from lamina.tracing import cast

if TYPE_CHECKING:
    from lamina.cache.packed_rows import PackedRows
    from lamina.cache.step import Step
    from lamina.cache.storage.prefetch import StagedPass


class TokenLayer(TokenStore):
    """A layer with one slot per token."""

    written_by_pass = True

    def extend(self, step: Step, key: Key, new: Fields) -> tuple[Fields, View]:
        """Stores this pass's tokens. -> the fields [R, *lead, S, D] that its queries read, and the View over them"""
        if self.bare:
            return new, step.view(("new", self.window), lambda: step.view_of_new(self.window))
        parts, view = self._extend(step, key, self.coding.encode(new))
        step.wrote(key)
        return self.coding.decode(parts), view

    def _extend(self, step: Step, key: Key, new: Fields) -> tuple[Fields, View]:
        """The same with parts as the codec stores them."""
        if self.layout.ring is None:
            return self._extend_line(step, new)
        if step.T == 1:
            return self._extend_ring_by_one(step, new)
        step.leave(key, self._newest(step, new))
        return self._extend_ring(step, new)

    def _extend_line(self, step: Step, new: Fields) -> tuple[Fields, View]:
        start = self.slots - step.T if step.cut else step.start
        if start is not None:
            end = start + step.T
            self.storage.write_run(self.data, step, start, new)
            if start == 0:
                return new, step.view(("new", self.window), lambda: step.view_of_new(self.window))
            tokens = self.storage.read_run(self.data, step, 0, end)
            return tokens, step.view(("line", self.window), lambda: step.view_of_run(self.window, 0, end))
        if step.exported:
            self._write_exported(step, new)
        else:
            self._write(step, "pass", new, step.real_tokens, step.counts)
        return self._read(step, step.bound)

    def packs(self, step: Step) -> bool:
        """Whether `extend_packed` stores the tokens of this pass: of a ring, commit must know that it takes them all;
        staging buffers know no single rows."""
        if self.bare or step.staged is not None:
            return False
        return self.layout.ring is None or (step.whole and not self.layout.keep)

    def extend_packed(self, step: Step, key: Key, new: Fields, rows: PackedRows) -> tuple[Fields, View]:
        """`extend` for rows side by side on one token axis, new [1, *lead, N, D]. -> the fields that its queries read,
        and the View of each row: the new tokens, side by side too, if all rows were empty, else those in the store"""
        parts = self.coding.encode(new)
        if self.layout.ring is None:
            tokens = {name: by_token(parts[name]) for name in self.data}
            at, slots = step.once(("packed", self.layout), lambda: self._packed_places(step, rows))
            self.storage.write(self.data, at, slots, tokens)
            step.wrote(key)
            if not step.empty_before:
                stored, view = self._read(step, step.bound)
                return self.coding.decode(stored), view
        else:
            step.leave(key, newest_of_packed(parts, rows, self.layout.ring))
        return self.coding.decode(parts), step.view(("new", self.window), lambda: step.view_of_new(self.window))

    def _packed_places(self, step: Step, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """The row [N] and the slot [N, 1] of each token of a packed pass."""
        at = torch.repeat_interleave(step.row_index, rows.counts, output_size=rows.tokens)
        starts = torch.repeat_interleave(rows.starts - step.before, rows.counts, output_size=rows.tokens)
        return at, self.layout.slots(torch.arange(rows.tokens, device=at.device) - starts)[:, None]

    def _write_exported(self, step: Step, new: Fields) -> None:
        """Writes the tokens of an exported pass into a line. Its last slot is never read, so padding goes there."""

        def make() -> Tensor:
            assert step.valid is not None
            return torch.where(step.valid, step.positions, self.slots - 1)

        slots = step.once(("exported", self.slots), make)
        self.storage.write(self.data, step.row_index, slots, {name: new[name] for name in self.data})

    def _extend_ring_by_one(self, step: Step, new: Fields) -> tuple[Fields, View]:
        start, layout = step.start, self.layout
        if start is None or layout.ring is None:
            self._write(step, "pass", new, step.real_tokens, step.counts)
            return self._read(step, step.bound)
        wrapped = start >= self.slots
        slot = layout.keep + (start - layout.keep) % layout.ring if wrapped else start
        self.storage.write_run(self.data, step, slot, new)
        if not wrapped:
            first, end = self._first_seen(start), start + 1
            if first is None:
                return self._read(step, end)
            tokens = self.storage.read_run(self.data, step, first, end)
            return tokens, step.view(("line", self.window), lambda: step.view_of_run(self.window, first, end))
        if isinstance(self.window, Sliding) and layout.ring == self.window.size:
            # Every slot is visible, and their order does not matter: no mask is needed.
            tokens = self.storage.read_run(self.data, step, 0, self.slots)
            return tokens, step.view(("whole ring", self.window), lambda: self._view_of_all(step))
        return self._read(step, None)

    def _extend_ring(self, step: Step, new: Fields) -> tuple[Fields, View]:
        start = step.start
        if start == 0:
            return new, step.view(("new", self.window), lambda: step.view_of_new(self.window))
        first = None if start is None or start > self.slots else self._first_seen(start)
        if start is not None and first is not None:  # not wrapped: slot = position
            held = self.storage.read_run(self.data, step, first, start)
            tokens = {name: torch.cat([held[name], new[name]], dim=-2) for name in held}
            end = start + step.T
            return tokens, step.view(("line", self.window), lambda: step.view_of_run(self.window, first, end))
        slots = self.slots
        held = self.storage.read_run(self.data, step, 0, slots)
        tokens = {name: torch.cat([held[name], new[name]], dim=-2) for name in held}

        def make() -> View:
            positions = self._within_reach(step, self.layout.positions(slots, step.before))
            return step.view_of(self.window, torch.cat([positions, step.new_positions], dim=1), new_at=slots)

        return tokens, step.view(("ring and new", self.window, self.layout, slots), make)

    def _read(self, step: Step, bound: int | None) -> tuple[Fields, View]:
        """All stored tokens, including those of this pass, up to slot `bound`."""
        slots = name = self.slots
        if bound is not None and step.exported:  # a size that varies: all lines have it, and it is no key of a dict
            slots, name = (bound, -1) if self.layout.ring is None else (slots, slots)
        elif bound is not None:
            slots = name = min(bound, slots)
        tokens = self.storage.read_run(self.data, step, 0, slots)

        def make() -> View:
            return step.view_of(self.window, self._within_reach(step, self.layout.positions(slots, step.after)))

        return tokens, step.view(("stored", self.window, self.layout, name), make)

    def held(self, step: Step, longest: int) -> tuple[Fields, Tensor]:
        """Tokens committed before this pass. -> fields [R, *lead, S, D], and the position in each slot [R, S], -1: none

        longest   at least the number of tokens of each row before the pass
        """
        slots = min(self.slots, longest)  # slot == position until a ring wraps
        tokens = self.coding.decode(self.storage.read_run(self.data, step, 0, slots))
        return tokens, self._within_reach(step, self.layout.positions(slots, step.before))

    def _first_seen(self, start: int) -> int | None:
        """First position of a contiguous range that holds all that queries at `start` or later can see; None if kept
        first tokens make that two ranges."""
        assert self.window.span is not None
        first = max(0, start + 1 - self.window.span)
        if not self.layout.keep:
            return first
        return 0 if first <= self.layout.keep else None

    def _within_reach(self, step: Step, held: Tensor) -> Tensor:
        """The positions `held` [R, S], with -1 for those that no query of this pass can see.

        A token that was rejected or rewound may have overwritten such a slot, with any values.
        """
        if self.window.span is None:
            return held
        behind = (held <= (step.before - self.window.span)[:, None]) & (held >= self.layout.keep)
        return torch.where(behind, -1, held)

    def _view_of_all(self, step: Step) -> View:
        return View(step.positions, self.layout.positions(self.slots, step.after), self.window, full=True)

    def _write(self, step: Step, kind: str, new: Fields, tokens: Tensor | None, counts: Tensor | None) -> None:
        """Writes the tokens with these indices in the pass [R, N] (all when None); rows with a count of 0 are not
        changed. Layers of one layout share slots: `kind` is the same for the same tokens and counts."""
        if step.T == 1:
            tokens = None  # each row has one token, or none, which `counts` says

        def make() -> tuple[Tensor | None, Tensor]:
            some = None if tokens is None else tokens.clamp(min=0)
            positions = step.positions if some is None else step.positions.gather(1, some)
            return some, self.layout.slots(positions).clamp(max=self.slots - 1)

        chosen, slots = step.once(("write", kind, self.layout, self.slots), make)
        if isinstance(new, Newest) or chosen is None:
            values = {name: new[name] for name in self.data}
        else:
            values = {name: gather_tokens(new[name], chosen) for name in self.data}
        if counts is not None:
            some = step.once(("written", kind), lambda: (counts > 0)[:, None, None])  # [R, 1, 1]
            for name, old in self.storage.read(self.data, step.row_index, slots).items():
                chosen_rows = some if old.dim() == 3 else some[..., None]
                values[name] = torch.where(chosen_rows, cast(values[name], old.dtype), old)
        self.storage.write(self.data, step.row_index, slots, values)

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(self, step: Step, pending: Fields, accepted: Tensor) -> None:
        layout = self.layout
        assert layout.ring is not None
        if isinstance(pending, NewestRun):
            return self._write_run(step, pending)
        self._write(step, "commit", pending, newest_tokens(accepted, min(layout.ring, step.T)), accepted)
        if layout.keep:
            first = torch.arange(layout.keep, device=accepted.device) - step.before[:, None]
            last = accepted[:, None] - 1
            inside = (first >= 0) & (first <= last)
            self._write(step, "commit first", pending, torch.where(inside, first, last), accepted)

    def _write_run(self, step: Step, run: NewestRun) -> None:
        """Writes tokens of rows of one length: one range of slots, or two where the ring ends."""
        at = 0
        for slot, end in self.layout.runs(run.first, run.first + next(iter(run.values())).shape[-2]):
            piece = {name: x[..., at : at + end - slot, :] for name, x in run.items()}
            self.storage.write_run(self.data, step, slot, piece)
            at += end - slot

    def _newest(self, step: Step, new: Fields) -> Fields:
        """What commit will write of the tokens `new`; all of them if the pass is not known to be taken whole."""
        ring = self.layout.ring
        if self.bare or not step.whole or ring is None or self.layout.keep:
            return new
        if step.start is not None:
            return last_run(new, step.start, ring)
        return new if ring >= step.T else only_newest(new, step.all_counts, ring)

    def commit_to_host(self, staged: StagedPass, step: Step, pending: Fields, accepted: Tensor) -> None:
        device_copy = staged.stage(self, step, {})
        device_copy.commit(step, pending, accepted)
        staged.write_back(self, device_copy.data, self.written(staged.lengths, staged.taken))
