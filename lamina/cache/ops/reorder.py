"""Reorder: replaces rows by other rows in place, as beam search does after every token, and copies only what differs.

Beams of one prompt have the prompt in common, and often many tokens after it. If row `to` becomes row `source`, only
tokens that the two do not have in common are copied (slots of lines and rings); recurrent states are copied whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.cache.counts import Counts, row_indices
from lamina.cache.layers.layout import Layout
from lamina.cache.ops.journal import Change
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache

SlotCopies = tuple[Tensor, Tensor, Tensor]
"""Slots to copy, as index tensors [N] each: the row copied to, the row copied from, the slot."""


@dataclass(frozen=True)
class Move:
    """Row `to` becomes what row `source` was; the two have their first `since` tokens in common."""

    to: int
    source: int
    since: int
    length: int  # of row `source`
    alike: bool  # True if both have the same length and marks: a slot then holds the same position in both
    reached: int  # one past the highest position ever written in either row


@dataclass(frozen=True)
class Moves:
    """All moves of one reorder. Copies are added to `change`, tensor by tensor, and made when it is carried out; all
    rows of a tensor are read before any is written."""

    moves: list[Move]
    device: torch.device
    change: Change
    _copies: dict[tuple[Layout, int], SlotCopies] = field(default_factory=dict)
    _elsewhere: dict[torch.device, Moves] = field(default_factory=dict)

    @cached_property
    def to(self) -> Tensor:
        return on_device([move.to for move in self.moves], self.device)

    @cached_property
    def source(self) -> Tensor:
        return on_device([move.source for move in self.moves], self.device)

    @cached_property
    def unrelated(self) -> Moves:
        """The moves between rows with no tokens in common, whose sources may differ too."""
        return Moves([move for move in self.moves if move.since == 0], self.device, self.change)

    def on(self, device: torch.device) -> Moves:
        """The same moves for tensors on that device."""
        if device == self.device:
            return self
        return self._elsewhere.setdefault(device, Moves(self.moves, device, self.change))

    def rows(self, tensor: Tensor) -> None:
        """Adds copies of whole rows of a tensor [B, ...]."""
        if self.moves:
            self.change.add(
                lambda: tensor.index_select(0, self.source), lambda rows: tensor.index_copy_(0, self.to, rows)
            )

    def slots(self, store: Tensor, layout: Layout) -> None:
        """Adds copies of the slots that may differ. store [B, *lead, S, D], with this layout"""
        to, source, slots = self.copies(layout, store.shape[-2])
        if len(slots):
            by_slot = store if store.dim() == 3 else store.transpose(1, 2)
            self.change.add(lambda: by_slot[source, slots], lambda tokens: by_slot.__setitem__((to, slots), tokens))

    def copies(self, layout: Layout, slots: int) -> SlotCopies:
        """The slots that may differ, for stores with this layout and number of slots; computed once for all layers."""
        key = (layout, slots)
        if key not in self._copies:
            found = [(one.to, one.source, slot) for one in self.moves for slot in differing_slots(one, layout, slots)]
            to, source, slot = (on_device([one[i] for one in found], self.device) for i in range(3))
            self._copies[key] = to, source, slot
        return self._copies[key]


def differing_slots(move: Move, layout: Layout, slots: int) -> Sequence[int]:
    """The slots whose contents may differ between rows `to` and `source`.

    >>> differing_slots(Move(to=1, source=0, since=5, length=8, alike=True, reached=8), Layout(ring=6), slots=6)
    [5, 0, 1]
    """
    if layout.most is None or move.reached <= layout.most:  # slot == position
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
    sources = row_indices(rows, cache.rows)
    shared = Counts.known(since, cache.rows, cache.device, "since").low
    if len(sources) != cache.rows:
        raise InputError(
            f"reorder needs one source row for each of the {cache.rows} rows, not {len(sources)}: {sources}"
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
    # Rows without tokens have nothing in common: they may have different sources.
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
