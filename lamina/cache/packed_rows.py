"""`PackedRows`: where each row is on the one token axis of a packed pass. Kernels read it in place of a row stride."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lamina.cache.clock import on_device


class PackedRows:
    """Rows of `counts` tokens, side by side: row r has tokens starts[r] … starts[r] + counts[r] - 1 of the axis.

    >>> rows = PackedRows([3, 0, 2], torch.device("cpu"))
    >>> rows.starts.tolist(), rows.tokens, rows.longest
    ([0, 3, 3], 5, 3)
    >>> rows.pieces(2)[0].tolist(), rows.pieces(2)[1]
    ([0, 2, 2], 3)
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.host_counts = list(counts)
        self.host_starts = _starts(self.host_counts)
        self.tokens, self.longest = sum(counts), max(counts, default=0)
        self.counts, self.starts = on_device(self.host_counts, device), on_device(self.host_starts, device)
        self._pieces: dict[int, tuple[Tensor, int]] = {}

    def __len__(self) -> int:
        return len(self.host_counts)

    def slices(self) -> list[slice]:
        """Each row's part of the axis."""
        return [slice(a, a + n) for a, n in zip(self.host_starts, self.host_counts, strict=True)]

    def pieces(self, length: int) -> tuple[Tensor, int]:
        """Pieces of up to `length` tokens of each row, in order: [R] each row's first piece, and how many in all"""
        if length not in self._pieces:
            each = [-(-count // length) for count in self.host_counts]
            self._pieces[length] = on_device(_starts(each), self.starts.device), sum(each)
        return self._pieces[length]


def _starts(counts: Sequence[int]) -> list[int]:
    """Sums of what comes before each."""
    return list(accumulate(counts, initial=0))[:-1]
