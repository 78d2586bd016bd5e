"""The clock of a cache: how many tokens each row holds.

The lengths are a tensor [B] on the device. Positions, slots and masks are computed from it there, so a decode step can
be captured in a CUDA graph. The host keeps bounds low <= length <= high for each row. While counts come from the host,
low == high and nothing is read back. Counts that are tensors on the device widen the bounds; the lengths are read back
only when `high` would force a store to grow or an error to be raised, which makes the bounds exact again.

Rewinding needs two more marks per row:
`written`  one past the highest position ever written into a ring. Tokens that later ones overwrote are lost, even if
           the later ones were rewound, so this mark and the slack together limit how far a row can be rewound.
`base`     the position of the recurrent base state. Recurrent layers can be rewound to this position and no further.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lamina.errors import InputError

MARKS = ("lengths", "written", "base")
BOUNDS = ("low", "high", "base_low", "sourced")


_later: ContextVar[list[Tensor] | None] = ContextVar("later", default=None)


@contextmanager
def zeroed_together() -> Iterator[None]:
    """Tensors that are allocated inside with `later=True` are zeroed together at the end: on a GPU by one launch for
    each dtype, where one for each store of a cache takes the host as long as all else about them."""
    tensors: list[Tensor] = []
    before = _later.set(tensors)
    try:
        yield
    finally:
        _later.reset(before)
        if tensors:
            alike: dict[torch.dtype, list[Tensor]] = {}
            for one in tensors:
                alike.setdefault(one.dtype, []).append(one)
            with torch.inference_mode(False), torch.no_grad():
                for group in alike.values():  # of several dtypes, each tensor would be a launch
                    torch._foreach_zero_(group)


def allocate(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    fill: float | None = 0,
    pinned: bool = False,
    later: bool = False,
) -> Tensor:
    """A tensor that can be written inside and outside `torch.inference_mode`, in whichever mode it is allocated.

    fill    None: uninitialized
    later   zeros may be written at the end of `zeroed_together`, since nothing is written before
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return allocate(shape, dtype, device, fill, pinned, later)
    if later and (tensors := _later.get()) is not None:
        tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return tensors[-1]
    if fill is None or 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
    if fill == 0:  # a memset: half the host time of a kernel that fills
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    return torch.full(shape, fill, dtype=dtype, device=device, pin_memory=pinned)


ALIGNED = 16  # bytes
BLOCK = 2 << 20  # bytes that small tensors share: what CUDA's allocator takes from the driver for them


def allocate_several(count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors of zeros, `allocate(…, later=True)` each. Small ones share blocks of up to `BLOCK` bytes: a block is
    allocated as fast as a tensor. It is freed when all of its tensors are dropped.

    >>> [one.tolist() for one in allocate_several(2, (3,), torch.int64, torch.device("cpu"))]
    [[0, 0, 0], [0, 0, 0]]
    """
    nbytes = math.prod(shape) * dtype.itemsize
    each = BLOCK // max(nbytes, 1)
    if each <= 1 or nbytes % ALIGNED:  # kernels assume that every store begins at one
        return [allocate(shape, dtype, device, later=True) for _ in range(count)]
    blocks = [
        allocate((min(each, count - start), *shape), dtype, device, later=True) for start in range(0, count, each)
    ]
    # `data`: views share one version counter, so a write to one would invalidate what autograd saved of another.
    return [one.data for block in blocks for one in block.unbind()]


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Copies integers from the host to an int64 tensor on the device, without a synchronization."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


class Clock:
    """Lengths and rewind marks of every row ([B] on the device), and the host's bounds on them (lists)."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.lengths, self.written, self.base = (allocate((rows,), torch.int64, device, later=True) for _ in MARKS)
        self.fault = allocate((1,), torch.bool, device, later=True)  # a count given on the device was out of range
        self.unchecked = False  # True if counts were given on the device since the host last read `fault`
        self.low = [0] * rows
        self.high = [0] * rows
        self.base_low = [0] * rows  # the host's lower bound on `base`
        self.sourced = [False] * rows  # True for rows that have an encoder output attached

    @property
    def rows(self) -> int:
        return len(self.low)

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def sync(self) -> list[int]:
        """Returns the lengths; reads them from the device if the host's bounds are not exact."""
        if self.unchecked:
            wrong = bool(self.fault.item())
            self.unchecked = False
            if wrong:
                self.fault.fill_(False)
                raise InputError(
                    "counts given on the device were negative or larger than the tokens of their pass; they were "
                    "clamped. Give counts between 0 and T, or give them as a list to have them checked at once."
                )
        if not self.exact:
            # `high` comes last: until it is set the bounds are not exact, so an interrupted read is repeated.
            self.base_low = self.base.tolist()  # with exact lengths, a stale bound would hide that a log is full
            self.low = self.lengths.tolist()
            self.high = list(self.low)
        return list(self.low)

    def note_out_of_range(self, out_of_range: Tensor) -> None:
        """Notes for counts given on the device whether some were out of range; the next `sync` raises if so."""
        self.fault.logical_or_(out_of_range)
        self.unchecked = True

    def move(
        self, rows: Iterable[int], index: Tensor | None, lengths: Tensor, low: Sequence[int], high: Sequence[int]
    ) -> None:
        """Sets the lengths of these rows, which the host knows to be between `low` and `high`. Idempotent."""
        if index is None:
            self.lengths.copy_(lengths)
        else:
            self.lengths.index_copy_(0, index, lengths)
        torch.maximum(self.written, self.lengths, out=self.written)
        for row, least, most in zip(rows, low, high, strict=True):
            self.low[row], self.high[row] = least, most

    def mark_written(self, ahead: int, index: Tensor | None) -> None:
        """Marks `ahead` positions past the lengths of these rows as written, whether or not they are committed."""
        if index is None:
            torch.maximum(self.written, self.lengths + ahead, out=self.written)
        else:
            mark = torch.maximum(self.written[index], self.lengths[index] + ahead)
            self.written.index_copy_(0, index, mark)

    def expect_advance(self, most: int | Sequence[int]) -> None:
        """Raises `high`, since the device will advance each row by up to `most` tokens (one value, or one per row).

        Called before the launch that advances the lengths, so the bounds hold whenever an interrupt comes."""
        more = [most] * self.rows if isinstance(most, int) else most
        self.high = [high + n for high, n in zip(self.high, more, strict=True)]

    def confirm_advance(self, least: Sequence[int], slack: int = 0) -> None:
        """Raises `low` after that launch: each row has advanced by at least `least` tokens."""
        low = [one + n for one, n in zip(self.low, least, strict=True)]
        # `base` is now at most 2 · slack tokens behind the length. A stale `base_low` is still a lower bound, so `low`
        # comes last.
        self.base_low = [max(base, one - 2 * slack) for base, one in zip(self.base_low, low, strict=True)]
        self.low = low

    def set_lengths(self, lengths: Tensor, host: Sequence[int]) -> None:
        """Sets the length of every row to one that is not larger than before. Idempotent."""
        self.lengths.copy_(lengths)
        self.low = list(host)
        self.high = list(host)

    def clear(self, rows: list[int], index: Tensor) -> None:
        for mark in (self.lengths, self.written, self.base):
            mark.index_fill_(0, index, 0)
        for row in rows:
            self.low[row] = self.high[row] = self.base_low[row] = 0
            self.sourced[row] = False

    def note_sources(self, rows: Iterable[int]) -> None:
        """Marks these rows as having an encoder output attached."""
        for row in rows:
            self.sourced[row] = True

    def read_marks(self) -> list[list[int]]:
        """Reads [length, written, base] of each row from the device, which also makes the bounds exact."""
        marks = torch.stack([getattr(self, name) for name in MARKS], dim=1).tolist()
        low, _, self.base_low = (list(mark) for mark in zip(*marks, strict=True))
        self.low = low
        self.high = list(low)
        return marks

    def values_of(self, rows: list[int], index: Tensor) -> dict[str, Tensor | list[int]]:
        """Marks and bounds of these rows, for `replace`."""
        marks = {name: getattr(self, name).index_select(0, index) for name in MARKS}
        return marks | {name: [getattr(self, name)[row] for row in rows] for name in BOUNDS}

    def replace(self, values: Mapping[str, Tensor | list[int]]) -> None:
        """Sets the marks and bounds of every row. Idempotent."""
        for name in MARKS:
            getattr(self, name).copy_(values[name])
        for name in BOUNDS:
            setattr(self, name, list(values[name]))

    def marks(self) -> dict[str, list[int]]:
        """Every mark of every row as lists of integers, for `set`."""
        self.sync()
        marks = dict(zip(MARKS, map(list, zip(*self.read_marks(), strict=True)), strict=True))
        return marks | {"sourced": [int(one) for one in self.sourced]}

    def set(self, marks: Mapping[str, list[int]]) -> None:
        """Sets every mark of every row from what `marks` of another clock returned."""
        for name in MARKS:
            getattr(self, name).copy_(torch.tensor(marks[name]))
        self.low, self.high, self.base_low = list(marks["lengths"]), list(marks["lengths"]), list(marks["base"])
        self.sourced = [bool(one) for one in marks["sourced"]]

    def select(self, rows: list[int], index: Tensor) -> Clock:
        """A new clock with the marks and bounds of these rows."""
        new = Clock(len(rows), self.lengths.device)
        for name in MARKS:
            getattr(new, name).copy_(getattr(self, name).index_select(0, index))
        new.fault.copy_(self.fault)
        new.unchecked = self.unchecked
        for name in BOUNDS:
            setattr(new, name, [getattr(self, name)[row] for row in rows])
        return new

    @staticmethod
    def join(clocks: list[Clock]) -> Clock:
        new = Clock(sum(clock.rows for clock in clocks), clocks[0].lengths.device)
        for name in MARKS:
            getattr(new, name).copy_(torch.cat([getattr(clock, name) for clock in clocks]))
        new.fault.copy_(torch.stack([clock.fault for clock in clocks]).any(0))
        new.unchecked = any(clock.unchecked for clock in clocks)
        for name in BOUNDS:
            setattr(new, name, [bound for clock in clocks for bound in getattr(clock, name)])
        return new
