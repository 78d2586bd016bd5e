"""Reordering rows in place: what beam search does after every token, copying no more than differs.

Beams of one prompt share it, and often many tokens after it. A row that becomes another one needs only the tokens that
the two do not have in common: their slots in lines and rings, and the whole of what is folded into a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.cache.counts import Counts, row_numbers
from lamina.cache.layers.layout import Layout
from lamina.cache.ops.journal import Change
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache

Places = tuple[Tensor, Tensor, Tensor]
"""Of each slot to be copied: the row it goes to, the row it comes from, the slot. [N] each"""


@dataclass(frozen=True)
class Move:
    """Row `to` becomes what row `source` was; the two have their first `since` tokens in common."""

    to: int
    source: int
    since: int
    length: int  # of the source
    alike: bool  # both have the same length and the same marks, so a slot holds the same position in both
    reached: int  # one past the highest position that either of them ever wrote


@dataclass(frozen=True)
class Moves:
    """All moves of one reordering. Copies are noted in `change`, tensor by tensor, and made when it is carried out: all
    rows of a tensor are read before any is written."""

    moves: list[Move]
    device: torch.device
    change: Change
    _places: dict[tuple[Layout, int], Places] = field(default_factory=dict)
    _elsewhere: dict[torch.device, Moves] = field(default_factory=dict)

    @cached_property
    def to(self) -> Tensor:
        return on_device([move.to for move in self.moves], self.device)

    @cached_property
    def source(self) -> Tensor:
        return on_device([move.source for move in self.moves], self.device)

    @cached_property
    def unrelated(self) -> Moves:
        """Those between rows that have nothing in common, not even what was there before the first token."""
        return Moves([move for move in self.moves if move.since == 0], self.device, self.change)

    def on(self, device: torch.device) -> Moves:
        """The same for tensors there."""
        if device == self.device:
            return self
        return self._elsewhere.setdefault(device, Moves(self.moves, device, self.change))

    def rows(self, tensor: Tensor) -> None:
        """Copies whole rows."""
        if self.moves:
            self.change.add(
                lambda: tensor.index_select(0, self.source), lambda rows: tensor.index_copy_(0, self.to, rows)
            )

    def slots(self, store: Tensor, layout: Layout) -> None:
        """Copies the slots that may differ. store [B, *lead, S, D], laid out as said"""
        to, source, slots = self.places(layout, store.shape[-2])
        if len(slots):
            by_slot = store if store.dim() == 3 else store.transpose(1, 2)
            self.change.add(lambda: by_slot[source, slots], lambda tokens: by_slot.__setitem__((to, slots), tokens))

    def places(self, layout: Layout, slots: int) -> Places:
        """The slots that may differ, in stores of so many; layers of one layout share them."""
        key = (layout, slots)
        if key not in self._places:
            found = [(move.to, move.source, slot) for move in self.moves for slot in differing(move, layout, slots)]
            to, source, slot = (on_device([one[i] for one in found], self.device) for i in range(3))
            self._places[key] = to, source, slot
        return self._places[key]


def differing(move: Move, layout: Layout, slots: int) -> Sequence[int]:
    """The slots of row `to` that may hold something else than those of `source`.

    >>> differing(Move(to=1, source=0, since=5, length=8, alike=True, reached=8), Layout(ring=6), slots=6)
    [5, 0, 1]
    """
    if layout.most is None or move.reached <= layout.most:  # a slot is a position
        return range(move.since, move.length)
    if not move.alike:
        return range(slots)
    assert layout.ring is not None
    first = range(move.since, min(layout.keep, move.length))
    oldest = max(move.since, layout.keep, move.length - layout.ring)
    return [*first, *(layout.keep + (p - layout.keep) % layout.ring for p in range(oldest, move.length))]


def reorder(cache: Cache, rows: Sequence[int] | Tensor, since: int | Sequence[int]) -> None:
    """See `Cache.reorder`."""
    clock = cache.clock
    sources = row_numbers(rows, cache.rows)
    shared = Counts.known(since, cache.rows, cache.device, "since").low
    if len(sources) != cache.rows:
        raise InputError(
            f"reorder needs one number in rows for each of the {cache.rows} rows, not {len(sources)}: {sources}"
        )
    marks = clock.read_marks()
    moves = []
    for to, (source, common) in enumerate(zip(sources, shared, strict=True)):
        if source == to:
            continue
        (length, written, _), (own_length, own_written, _) = marks[source], marks[to]
        if not 0 <= common <= min(length, own_length):
            raise InputError(
                f"since={common} for row {to}: rows {to} and {source} hold {own_length} and {length} tokens, and can "
                f"have 0 to {min(length, own_length)} in common"
            )
        alike = marks[source] == marks[to]
        moves.append(Move(to, source, common, length, alike, max(written, own_written)))
    cache._abort_open_pass()
    change, index = Change(), on_device(sources, cache.device)
    if cache._logits is not None:
        Moves(moves, cache.device, change).rows(cache._logits)
    # Rows without a token have nothing in common, not even a source.
    different = [move for move in moves if not (move.alike and move.since == move.length > 0)]
    these = Moves(different, cache.device, change)
    if cache.pages is not None:
        cache.pages.reorder(these)
    for entry in cache.layers:
        for layer in entry.values():
            layer.reorder(these)
    these.slots(cache.record[..., None], Layout())
    change.add(lambda: clock.of(sources, index), clock.replace)
    cache.carry_out(change)
