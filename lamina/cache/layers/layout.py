"""The slot of a token: a pure function from position to slot and back.

Two layouts cover every kind of store. In a *line* the token at position p is in slot p. In a *ring* of R slots it is in
slot p % R, so the ring holds the newest R tokens and each token overwrites the one R positions before it. A ring may
keep the first tokens for ever (attention sinks): those have slots of their own in front of the ring.

    ring of 4, one kept, after 7 tokens:   slot      0 | 1 2 3 4
                                           position  0 | 5 6 3 4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """A line (`ring=None`) or a ring of `ring` slots behind `keep` slots for the first tokens.

    >>> Layout(ring=4).slots(torch.tensor([3, 4, 5]))
    tensor([3, 0, 1])
    """

    ring: int | None = None
    keep: int = 0

    @property
    def most(self) -> int | None:
        """How many slots this layout can ever use; None if there is no limit."""
        return None if self.ring is None else self.keep + self.ring

    def slots(self, positions: Tensor) -> Tensor:
        """The slot of each position."""
        if self.ring is None:
            return positions
        around = self.keep + (positions - self.keep) % self.ring
        return torch.where(positions < self.keep, positions, around) if self.keep else around

    def runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """The slots of those positions first … end - 1 that are not overwritten, as ranges (first slot, end slot).

        >>> Layout(ring=4, keep=1).runs(0, 7)
        [(0, 1), (3, 5), (1, 3)]
        """
        if self.ring is None:
            return [(first, end)] if first < end else []
        around = max(first, self.keep, end - self.ring)
        slot = self.keep + (around - self.keep) % self.ring
        stop = slot + end - around
        most = self.keep + self.ring
        found = [(first, min(end, self.keep)), (slot, min(stop, most)), (self.keep, stop - self.ring)]
        return [(a, b) for a, b in found if a < b]

    def positions(self, slots: int, lengths: Tensor) -> Tensor:
        """The position that each of the first `slots` slots holds in rows of these lengths, -1 if none.

        lengths: [B] -> [B, slots]
        """
        slot = torch.arange(slots, device=lengths.device)[None]
        last = lengths[:, None] - 1
        if self.ring is None:
            return torch.where(slot <= last, slot, -1)
        around = last - (last - slot) % self.ring
        held = torch.where(around >= self.keep, around, -1)
        return torch.where(slot < self.keep, torch.where(slot <= last, slot, -1), held) if self.keep else held
