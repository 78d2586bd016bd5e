"""The one clock of a cache: how many tokens each row holds.

The truth is a tensor on the device, so that positions, slots and visibility are arithmetic on it and a decode step can
be captured. Beside it the host keeps, for each row, an interval [low, high] that the length lies in. While counts come
from the host the interval is a point and nothing is ever read back; counts that live on the device widen it, and only
when `high` would force growth or an error are the lengths read once, which closes it again.

Two more marks a row follow from rewinding:
`written`  one past the highest position ever written into a ring. A rewound row has lost the tokens that later ones
           overwrote, so how far it can go back depends on this mark, not on the slack alone.
`base`     the position of the recurrent base state: recurrent layers can be taken back to it and no further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lamina.errors import InputError

MARKS = ("lengths", "written", "base")
BOUNDS = ("low", "high", "base_low", "sourced")


def allocate(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: float | None = 0, pinned: bool = False
) -> Tensor:
    """A tensor that may be written inside and outside `torch.inference_mode`, whoever makes it. `fill=None`: with any
    numbers in it."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return allocate(shape, dtype, device, fill, pinned)
    if fill is None:
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
    return torch.full(shape, fill, dtype=dtype, device=device, pin_memory=pinned)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers from the host, without waiting for the device."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


class Clock:
    """Lengths and rewind marks of every row, with the host's bounds on them."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.lengths = allocate((rows,), torch.int64, device)
        self.written = allocate((rows,), torch.int64, device)
        self.base = allocate((rows,), torch.int64, device)
        self.fault = allocate((1,), torch.bool, device)  # a device-side count was out of range
        self.doubted = False  # whether there were such counts since the host looked
        self.low = [0] * rows
        self.high = [0] * rows
        self.base_low = [0] * rows  # the host's lower bound on `base`
        self.sourced = [False] * rows  # which rows have an encoder's output attached

    @property
    def rows(self) -> int:
        return len(self.low)

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def sync(self) -> list[int]:
        """Reads the lengths once (when the host is not sure of them) and returns them."""
        if self.doubted:
            wrong = bool(self.fault.item())
            self.doubted = False
            if wrong:
                self.fault.fill_(False)
                raise InputError(
                    "counts given on the device were negative or larger than the tokens of their pass; they were "
                    "clamped. Give counts between 0 and T, or give them as a list to have them checked at once."
                )
        if not self.exact:
            # `high` last: until then the host is not exact, and an interrupted read is made again.
            self.base_low = self.base.tolist()  # an old bound, taken for the mark itself, would hide a full log
            self.low = self.lengths.tolist()
            self.high = list(self.low)
        return list(self.low)

    def doubt(self, out_of_range: Tensor) -> None:
        """Counts were given on the device: the next `sync` tells if this says that some were out of range."""
        self.fault.logical_or_(out_of_range)
        self.doubted = True

    def move(
        self, rows: Iterable[int], index: Tensor | None, lengths: Tensor, low: Sequence[int], high: Sequence[int]
    ) -> None:
        """The given rows hold `lengths` tokens now, which the host knows to lie between `low` and `high`. May be
        repeated."""
        if index is None:
            self.lengths.copy_(lengths)
        else:
            self.lengths.index_copy_(0, index, lengths)
        torch.maximum(self.written, self.lengths, out=self.written)
        for row, least, most in zip(rows, low, high, strict=True):
            self.low[row], self.high[row] = least, most

    def touch(self, ahead: int, index: Tensor | None) -> None:
        """Marks that `ahead` positions past these rows' lengths are written from now on, committed or not."""
        if index is None:
            torch.maximum(self.written, self.lengths + ahead, out=self.written)
        else:
            mark = torch.maximum(self.written[index], self.lengths[index] + ahead)
            self.written.index_copy_(0, index, mark)

    def drift(self, most: int | Sequence[int]) -> None:
        """Rows are about to go on by up to `most` tokens (one number for all, or one a row); the device alone knows how
        far. To be called before the device is told: the interval then holds whenever an interrupt comes."""
        more = [most] * self.rows if isinstance(most, int) else most
        self.high = [high + n for high, n in zip(self.high, more, strict=True)]

    def drifted(self, least: Sequence[int]) -> None:
        """After `drift`, when the device has been told: each row went on by at least `least` tokens."""
        low = [one + n for one, n in zip(self.low, least, strict=True)]
        # A captured pass moves `base` to the length. An old bound on it is still a bound, so the length comes last.
        self.base_low = [max(*both) for both in zip(self.base_low, low, strict=True)]
        self.low = low

    def take_back(self, counts: Tensor, host: list[int]) -> None:
        self.lengths -= counts
        self.low = [low - n for low, n in zip(self.low, host, strict=True)]
        self.high = [high - n for high, n in zip(self.high, host, strict=True)]

    def put_back(self, lengths: Tensor, host: Sequence[int]) -> None:
        """Every row holds `lengths` tokens, no more than before. May be repeated."""
        self.lengths.copy_(lengths)
        self.low = list(host)
        self.high = list(host)

    def set_zero(self, rows: list[int], index: Tensor) -> None:
        for mark in (self.lengths, self.written, self.base):
            mark.index_fill_(0, index, 0)
        for row in rows:
            self.low[row] = self.high[row] = self.base_low[row] = 0
            self.sourced[row] = False

    def note_sources(self, rows: Iterable[int]) -> None:
        """These rows have an encoder's output from now on."""
        for row in rows:
            self.sourced[row] = True

    def read_marks(self) -> list[list[int]]:
        """Length, `written` and `base` of each row, read once."""
        marks = torch.stack([getattr(self, name) for name in MARKS], dim=1).tolist()
        low, _, self.base_low = (list(mark) for mark in zip(*marks, strict=True))
        self.low = low
        self.high = list(low)
        return marks

    def of(self, rows: list[int], index: Tensor) -> dict[str, Tensor | list[int]]:
        """Marks and bounds of these rows, for `replace`."""
        marks = {name: getattr(self, name).index_select(0, index) for name in MARKS}
        return marks | {name: [getattr(self, name)[row] for row in rows] for name in BOUNDS}

    def replace(self, values: Mapping[str, Tensor | list[int]]) -> None:
        """Every row has these marks and bounds from now on. May be repeated."""
        for name in MARKS:
            getattr(self, name).copy_(values[name])
        for name in BOUNDS:
            setattr(self, name, list(values[name]))

    def marks(self) -> dict[str, list[int]]:
        """Every mark of every row as plain numbers, for `set`."""
        self.sync()
        marks = dict(zip(MARKS, map(list, zip(*self.read_marks(), strict=True)), strict=True))
        return marks | {"sourced": [int(one) for one in self.sourced]}

    def set(self, marks: Mapping[str, list[int]]) -> None:
        """Goes on from where another clock was."""
        for name in MARKS:
            getattr(self, name).copy_(torch.tensor(marks[name]))
        self.low, self.high, self.base_low = list(marks["lengths"]), list(marks["lengths"]), list(marks["base"])
        self.sourced = [bool(one) for one in marks["sourced"]]

    def select(self, rows: list[int], index: Tensor) -> Clock:
        """A clock of its own for these rows."""
        new = Clock(len(rows), self.lengths.device)
        for name in MARKS:
            getattr(new, name).copy_(getattr(self, name).index_select(0, index))
        new.fault.copy_(self.fault)
        new.doubted = self.doubted
        for name in BOUNDS:
            setattr(new, name, [getattr(self, name)[row] for row in rows])
        return new

    @staticmethod
    def join(clocks: list[Clock]) -> Clock:
        new = Clock(sum(clock.rows for clock in clocks), clocks[0].lengths.device)
        for name in MARKS:
            getattr(new, name).copy_(torch.cat([getattr(clock, name) for clock in clocks]))
        new.fault.copy_(torch.stack([clock.fault for clock in clocks]).any(0))
        new.doubted = any(clock.doubted for clock in clocks)
        for name in BOUNDS:
            setattr(new, name, [bound for clock in clocks for bound in getattr(clock, name)])
        return new
