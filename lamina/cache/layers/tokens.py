"""Token stores: tensors with one slot per token, laid out as a line or a ring.

A field is a tensor [B, *lead, S, D] with slots on the second last axis. A codec stores a field as several such parts
(codes, scales …); parts are written and read by slot like fields, and only the slots that a pass reads are dequantized.
A `Storage` says where the parts are: on the device, on the host, or in pages.

A line is written in place, since slots past a row's length are unused. A ring is written in place by a pass of one
token: the slot it overwrites holds a token that neither this query nor any rewind within the slack can see. In a pass
of several tokens, these attend over the ring and over each other, and commit writes those that are accepted.

Padding is never stored. In a pass with padding, each padding token writes the values of the row's last real token to
that token's slot: the slot is written several times with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from lamina.attention.view import View
from lamina.attention.window import Chunked, Sliding, Window
from lamina.cache.clock import Clock, allocate, allocate_several
from lamina.cache.codec.codec import Coding, Role
from lamina.cache.codec.formats import Fields
from lamina.cache.layers.base import Key, Layer, grown
from lamina.cache.layers.layout import Layout
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
from lamina.cache.storage.device import Storage
from lamina.cache.storage.host import storage_for
from lamina.tracing import cast

if TYPE_CHECKING:
    from lamina.cache.ops.reorder import Moves
    from lamina.cache.packed_rows import PackedRows
    from lamina.cache.spec import Keeping, Spec
    from lamina.cache.step import Step
    from lamina.cache.storage.paged import PagedPart
    from lamina.cache.storage.prefetch import SlotRuns, StagedPass

SMALLEST = 32  # slots a growing store starts with


def layout_for(window: Window, slack: int) -> Layout:
    """The layout that holds the tokens that a window can see, and `slack` more to rewind to.

    >>> layout_for(Sliding(4), slack=2)
    Layout(ring=6, keep=0)
    """
    if window.span is None:
        return Layout()
    keep = window.keep if isinstance(window, Sliding) else 0
    return Layout(ring=window.span + slack, keep=keep)


@cache
def column_of(part: str) -> str:
    """The kernel-table column for the address of a part.

    >>> column_of("v"), column_of("latent.codes"), column_of("latent.scales")
    ('v', 'k', 'k.scales')
    """
    field, _, rest = part.partition(".")
    field = field if field in ("k", "v") else "k"
    return field if rest in ("", "codes") else f"{field}.{rest}"


class TokenLayer(Layer):
    """A layer with one slot per token."""

    layout: Layout

    roles: Mapping[str, Role] = {}
    """Field -> its role for the codec (key, value …); a field without a role is stored unquantized."""

    written_by_pass = True

    pageable = True

    def __init__(
        self, spec: Spec, fields: Mapping[str, tuple[int, ...]], window: Window, keeping: Keeping | None
    ) -> None:
        super().__init__(spec)
        self.window = window
        self.slack = keeping.slack if keeping else 0
        self.layout = layout_for(window, self.slack)
        self.grows = keeping is not None and keeping.capacity is None
        self.storage = storage_for(keeping)
        if keeping is None:
            self.coding = Coding()
        else:
            self.coding = Coding.of(keeping, self.roles, {name: dim for name, (*_, dim) in fields.items()})
            most = self.layout.most
            slots = keeping.capacity if keeping.capacity is not None else 0
            slots = slots if most is None else min(slots, most)
            for name, (*lead, dim) in fields.items():
                for part, (width, dtype) in self.coding.parts(name, dim, keeping.dtype).items():
                    self.data[part] = self.storage.make(keeping.rows, lead, slots, width, dtype, keeping.device)

    @property
    def slots(self) -> int:
        return self.storage.slots(self.data)

    @property
    def in_line(self) -> bool:
        return self.layout.ring is None and type(self.storage) is Storage

    @property
    def limit(self) -> int | None:
        if self.grows or self.bare or self.slots == self.layout.most:
            return None
        return self.slots

    @property
    def kind(self) -> str:
        name = super().kind
        match self.window:
            case Sliding(size=size, keep=keep):
                return f"{name}, sliding {size}" + (f" + first {keep}" if keep else "")
            case Chunked(size=size):
                return f"{name}, chunks of {size}"
        return name

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes(self.data)

    @property
    def format(self) -> str:
        return str(self.coding.codec) if self.coding.formats else super().format

    def columns(self) -> dict[str, int]:
        storage = self.storage
        columns = {"slots": storage.slots(self.data), "ring": self.layout.ring or 0, "keep": self.layout.keep}
        for name, part in self.data.items():
            columns[column_of(name)] = part.data_ptr()
        columns.update(storage.columns())
        return columns

    # -- room ------------------------------------------------------------------------------------------------------

    @property
    def can_twin(self) -> bool:
        return not self.bare and self.slots == 0

    def reserve(self, tokens: int) -> None:
        if self.grows and not self.bare:
            self.widen(self._slots_for(tokens))

    def reserve_twins(self, twins: Sequence[Self], tokens: int) -> None:
        if not twins or type(self.storage) is not Storage or not self.grows:
            super().reserve_twins(twins, tokens)
            return
        slots = self._slots_for(tokens)
        if slots == 0:
            return
        every, stores = (self, *twins), []
        for old in self.data.values():
            shape = (*old.shape[:-2], slots, old.shape[-1])
            stores.append(allocate_several(len(every), shape, old.dtype, old.device))
        grows = slots != self.layout.most
        for one, *parts in zip(every, *stores, strict=True):
            one.data = dict(zip(self.data, parts, strict=True))
            one.grows = grows

    def _slots_for(self, tokens: int) -> int:
        """How many slots a layer that grows has after `reserve`."""
        most, have = self.layout.most, self.slots
        needed = tokens if most is None else min(tokens, most)
        slots = max(SMALLEST, grown(have, needed, self.expected)) if needed > have else have
        return slots if most is None else min(slots, most)

    def widen(self, slots: int) -> None:
        if slots > self.slots:
            self.storage.widen(self.data, slots)
        if (most := self.layout.most) is not None:
            self.grows = self.grows and self.slots != most

    def used(self, longest: int, written: int) -> Self:
        wrapped = self.layout.most is not None and written > self.layout.most
        end = self.slots if wrapped else longest  # slot == position until the ring wraps
        new = self._with(self.storage.cut(self.data, end))
        new.storage = self.storage.first(end)
        if end < self.slots == self.layout.most:
            new.grows = True  # a full ring that was cut may grow to its full size again
        return new

    def join_lines(self, parts: Sequence[Layer], rows: int, capacity: int | None, longest: int, slack: int) -> Self:
        """Joins the rows of layers that are all `in_line`, with room for the longest row. Each token is copied once."""
        slots = max(longest, SMALLEST, *(part.slots or 0 for part in parts)) if capacity is None else capacity
        new = self._with({})
        new.slack, new.grows = slack, capacity is None
        for name, like in self.data.items():
            store = allocate((rows, *like.shape[1:-2], slots, like.shape[-1]), like.dtype, like.device)
            at = 0
            for part in parts:
                old = part.data[name]
                count, *_, tokens, _ = old.shape
                store.narrow(0, at, count).narrow(-2, 0, tokens).copy_(old)
                at += count
            new.data[name] = store
        return new

    def row_line(self, row: int, tokens: int) -> Self:
        """The first tokens of one row of a layer that is `in_line`, as a view."""
        return self._with({name: store[row : row + 1, ..., :tokens, :] for name, store in self.data.items()})

    # -- a pass ----------------------------------------------------------------------------------------------------

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

    # -- on the host -----------------------------------------------------------------------------------------------

    def needed(self, lengths: list[int]) -> SlotRuns:
        span, layout, pieces = self.window.span, self.layout, []
        for row, length in enumerate(lengths):
            first = 0 if span is None else max(0, length + 1 - span)  # first position that the first new token sees
            if first:
                pieces += [(row, 0, min(layout.keep, first))]
            pieces += [(row, *run) for run in layout.runs(first, length)]
        return {name: pieces for name in self.data}

    def commit_to_host(self, staged: StagedPass, step: Step, pending: Fields, accepted: Tensor) -> None:
        device_copy = staged.stage(self, step, {})
        device_copy.commit(step, pending, accepted)
        staged.write_back(self, device_copy.data, self.written(staged.lengths, staged.taken))

    def written(self, lengths: list[int], new: list[int]) -> SlotRuns:
        runs = [(row, *run) for row, n in enumerate(new) for run in self.layout.runs(lengths[row], lengths[row] + n)]
        return {name: runs for name in self.data}

    # -- verbs -----------------------------------------------------------------------------------------------------

    def rewindable(self, clock: Clock) -> Tensor | None:
        if self.layout.ring is None:
            return None
        kept = (self.slack + 1 - (clock.written - clock.lengths)).clamp(min=0, max=self.slack)
        never_overwritten = clock.written - self.layout.keep <= self.layout.ring
        return torch.where(never_overwritten, clock.lengths, kept)

    def poison(self, clock: Clock, value: float = float("nan")) -> None:
        if not self.slots:
            return
        held = self.layout.positions(self.slots, clock.lengths)  # [B, S]
        free = held < 0
        if self.layout.ring is not None:  # slots that a token overwrote which was then rejected or rewound
            free |= (held >= self.layout.keep) & (held + self.layout.ring < clock.written[:, None])
        self.storage.fill(self.data, free, value)

    def reorder(self, moves: Moves) -> None:
        self.storage.reorder(self.data, moves, self.layout)

    @property
    def like(self) -> Fields:
        return self.storage.like(self.data)

    def copied(self, index: Tensor) -> Self:
        if not self.storage.paged:
            return self.select(index)
        new = self._with(self.storage.copied(self.data, index))
        new.storage = Storage()
        return new

    def part(self, name: str, shape: Sequence[int]) -> Tensor | PagedPart:
        return self.storage.part(self.data, name, shape)

    def fit(self, like: Self, clock: Clock) -> Self:
        if self.layout == like.layout and self.slots == like.slots:
            return self
        held = like.layout.positions(like.slots, clock.lengths)  # [B, S of like]
        source = self.layout.slots(held.clamp(min=0)).clamp(max=max(self.slots - 1, 0))
        rows = torch.arange(len(held), device=held.device)
        new = self._with(dict(like.select(torch.zeros_like(rows)).data))
        new.slack, new.layout, new.grows, new.storage = like.slack, like.layout, like.grows, like.storage
        if self.slots:
            slots = torch.arange(like.slots, device=held.device).expand(len(held), -1)
            new.storage.write(new.data, rows, slots, self.storage.read(self.data, rows, source))
        return new
