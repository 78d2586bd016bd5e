"""Which blocks of keys the blocks of queries see: what a kernel loops over, so that no query × key mask is needed.

A block is judged by its lowest and highest position. So a pair of blocks may be counted as seen although no query in it
sees a key: the kernel applies the rule of the View inside such blocks. It never applies it inside blocks that are seen
whole, and these are judged exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.attention.window import Chunked, Near, Sliding, Window

if TYPE_CHECKING:
    from lamina.attention.view import View

FAR = 1 << 40  # beyond every position


@dataclass(frozen=True)
class Blocks:
    """Blocks of keys, block of queries by block of queries.

    order   int32 [B, NQ, NK]: those seen whole, then those seen in part, then the others
    whole   int32 [B, NQ]: how many blocks of keys every query of the block sees whole
    seen    int32 [B, NQ]: seen whole or in part
    """

    order: Tensor
    whole: Tensor
    seen: Tensor


@dataclass(frozen=True)
class _Range:
    """The lowest and highest value in each block [B, blocks], of those that are not -1; and whether there is a -1."""

    low: Tensor
    high: Tensor
    gaps: Tensor

    @classmethod
    def of(cls, values: Tensor, size: int) -> _Range:
        """values [B, N] -> of blocks of `size`; the last one is filled up with -1."""
        count = -(-values.shape[1] // size)
        blocks = torch.nn.functional.pad(values, (0, count * size - values.shape[1]), value=-1).unflatten(
            1, (count, -1)
        )
        gone = blocks < 0
        return cls(torch.where(gone, FAR, blocks).amin(2), blocks.amax(2), gone.any(2))

    @property
    def of_queries(self) -> _Range:
        """With an axis for blocks of keys behind it."""
        return _Range(self.low[:, :, None], self.high[:, :, None], self.gaps[:, :, None])

    @property
    def of_keys(self) -> _Range:
        return _Range(self.low[:, None], self.high[:, None], self.gaps[:, None])


def blocks_of(view: View, queries: int, keys: int) -> Blocks:
    """The blocks of a View without rules from outside, for blocks of `queries` queries and `keys` keys.

    >>> from lamina.attention import Full, View
    >>> at = torch.arange(8)[None]
    >>> found = blocks_of(View(at, at, Full()), queries=4, keys=2)
    >>> found.order[0].tolist(), found.whole[0].tolist(), found.seen[0].tolist()
    ([[0, 1, 2, 3], [0, 1, 2, 3]], [0, 2], [2, 4])
    """
    q, kv = _Range.of(view.q_positions, queries).of_queries, _Range.of(view.kv_positions, keys).of_keys
    part, whole = _seen(view.window, q, kv)
    if view.causal:
        part, whole = part & (kv.low <= q.high), whole & (kv.high <= q.low)
    if view.q_spans is not None and view.kv_spans is not None:
        mine, theirs = _Range.of(view.q_spans, queries).of_queries, _Range.of(view.kv_spans, keys).of_keys
        part = part | ((mine.low <= theirs.high) & (theirs.low <= mine.high))
    if view.q_segments is not None and view.kv_segments is not None:
        mine, theirs = _Range.of(view.q_segments, queries).of_queries, _Range.of(view.kv_segments, keys).of_keys
        part = part & (mine.low <= theirs.high) & (theirs.low <= mine.high)
        whole = whole & (mine.low == theirs.high) & (theirs.low == mine.high) & ~theirs.gaps
    return in_order(part & (kv.high >= 0), whole & ~kv.gaps)


def in_order(part: Tensor, whole: Tensor) -> Blocks:
    """From which blocks of keys are seen in part and whole, both [B, NQ, NK]."""
    rank = 2 - (part | whole).int() - whole.int()  # 0: seen whole, 1: in part, 2: not
    order = rank.argsort(dim=2, stable=True).int()
    return Blocks(order, (rank == 0).sum(2, dtype=torch.int32), (rank < 2).sum(2, dtype=torch.int32))


def _seen(window: Window, q: _Range, kv: _Range) -> tuple[Tensor, Tensor]:
    """Whether the window shows some keys of a block to some queries, and all to all. [B, NQ, NK] both"""
    match window:
        case Sliding(size=size, keep=keep):
            return (kv.high > q.low - size) | (kv.low < keep), (kv.low > q.high - size) | (kv.high < keep)
        case Near(size=size):
            part = (kv.high >= q.low - size) & (kv.low <= q.high + size)
            return part, (kv.low >= q.high - size) & (kv.high <= q.low + size)
        case Chunked(size=size):
            q_first, q_last, first, last = (x // size for x in (q.low, q.high, kv.low, kv.high))
            return (first <= q_last) & (q_first <= last), (first == q_last) & (q_first == last)
    everything = (q.low == q.low) & (kv.low == kv.low)
    return everything, everything
