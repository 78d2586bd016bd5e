"""Split-KV: how the visible tokens of all rows are divided over the programs of a launch.

The list of a row's visible tokens (`visible.py`) is cut into splits, one program each. Splits have about the same size
in all rows, as small as the grid has programs for; the splits of one row are equal, and of `least` tokens or more.
Every program computes this for itself on the device (`assigned_split`), and one that finds no split left exits at once.
So a launch that was captured once fits every length, and a long row among short ones gets many splits.

The programs of a row merge their partial results (`online_softmax.py`). How a row is split depends on the other rows of
the batch, so its result may differ by a rounding between batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.attention.online_softmax import TAIL
from lamina.kernels.attention.visible import visible
from lamina.kernels.entry import row_of
from lamina.kernels.launch import prefetch_l2
from lamina.kernels.limits import Limits
from lamina.kernels.workspace import COUNTERS

MERGE_BYTES = 1 << 16  # of splits that one program merges at once; with more bytes, two levels are faster


# -- inside kernels --------------------------------------------------------------------------------------------------


@triton.jit
def divide(n_visible, most, least, BLOCK: tl.constexpr):
    """-> (tokens per split, number of splits) of one row; at least one split, for the new tokens.

    most: splits that the row may have. least: tokens that a split has at least. A split is blocks of BLOCK tokens.
    """
    splits = tl.maximum(tl.minimum(most, tl.cdiv(n_visible, least)), 1)
    split_tokens = tl.maximum(tl.cdiv(tl.cdiv(n_visible, splits), BLOCK), 1) * BLOCK
    return split_tokens, tl.maximum(tl.cdiv(n_visible, split_tokens), 1)


@triton.jit
def split_size(n_visible, real, wanted, least):
    """Smallest candidate split size whose splits fit the grid; no limit if none fits.

    n_visible and real [ROWS]: visible tokens of each row, and which rows exist. Candidates start at the size that gives
    `wanted` equal splits.
    """
    steps = tl.arange(0, 16)
    larger = tl.exp2((steps * steps).to(tl.float32) / 64)  # 1, 1.01, 1.04, 1.1 … 11
    size = tl.maximum((tl.sum(n_visible).to(tl.float32) / wanted * larger).to(tl.int32) + 1, least)
    splits = tl.where(real[None, :], tl.maximum(tl.cdiv(n_visible[None, :], size[:, None]), 1), 0)
    return tl.min(tl.where(tl.sum(splits, 1) <= tl.num_programs(1), size, 1 << 30))


@triton.jit
def assigned_split(
    table, rows, wanted, size, keep, least,  # the entry's table row; number of rows; target number of splits; window
    T: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The split of this program of a grid (…, items).

    -> (row, split, n_splits, base, split_tokens, length, count, kept, first, n_visible, ring): split number `split` of
    the row's `n_splits`, each of `split_tokens` tokens, the first of which is item `base`. There is none if
    split >= n_splits.

    ROWS: the number of rows, padded to a power of two. With several rows, items are assigned in reverse order: the
    programs without a split start first, and may have exited when the launch before ends.
    """
    item = tl.program_id(1)
    if ROWS == 1:
        row, base, most = 0, 0, tl.num_programs(1)
        length, count = row_of(table, 0, T)
    else:
        item = tl.num_programs(1) - 1 - item
        r = tl.arange(0, ROWS)
        real = r < rows
        lengths, counts = row_of(table, tl.minimum(r, rows - 1), T)
        _kept, _first, in_rows, _ring = visible(table, lengths, counts, size, keep, KIND)
        in_rows = tl.where(real, in_rows, 0)
        longest = split_size(in_rows, real, wanted, least)
        splits = tl.where(real, tl.maximum(tl.cdiv(in_rows, longest), 1), 0)
        stops = tl.cumsum(splits, 0)
        row = tl.sum((stops <= item).to(tl.int32))  # rows whose items all come before; past the last row: no split
        mine = r == row
        most, base = tl.sum(tl.where(mine, splits, 0)), tl.sum(tl.where(mine, stops - splits, 0))
        length, count = tl.sum(tl.where(mine, lengths, 0)), tl.sum(tl.where(mine, counts, 0))
    kept, first, n_visible, ring = visible(table, length, count, size, keep, KIND)
    split_tokens, n_splits = divide(n_visible, most, least, BLOCK)
    n_splits = tl.where(most > 0, n_splits, 0)
    return row, item - base, n_splits, base, split_tokens, length, count, kept, first, n_visible, ring


@triton.jit
def prefetch(store, begins, ends, WIDTH: tl.constexpr):
    """Prefetches the tokens begins … ends - 1 of a line, WIDTH values each, to L2.

    No launch of this pass writes them, so a program may prefetch before `begin`.
    """
    if ends > begins:
        prefetch_l2(store + begins * WIDTH, (ends - begins) * (WIDTH * store.dtype.element_ty.primitive_bitwidth // 8))


# -- on the host -----------------------------------------------------------------------------------------------------


def shortest_split(block: int) -> int:
    """The fewest tokens that are worth a program. Wide heads have small blocks, and there reading takes longer than
    merging: shorter splits pay."""
    return 256 if block > 32 else 32


def target_splits(rows: int, heads: int, slots: int | None, least: int, multiprocessors: int, *, waves: int = 1) -> int:
    """How many splits a launch aims at in all rows: with `heads` programs per split, `waves` programs per SM.

    slots   the most tokens that a row can see, None if not known

    >>> target_splits(1, 8, 128, 256, 132), target_splits(1, 8, None, 256, 132), target_splits(32, 8, 512, 256, 132)
    (1, 16, 16)
    """
    room = max(waves * multiprocessors // heads, 1)
    return room if slots is None else max(1, min(room, triton.cdiv(rows * slots, least)))


def prefetch_tokens(kind: str, token_bytes: int, block: int, limits: Limits) -> int:
    """How many tokens of its split a program prefetches before `begin`: two blocks, where the device supports it and a
    split is contiguous."""
    return 2 * block if limits.pdl and kind == "full" and token_bytes % 16 == 0 else 0


def bunch_for(most: int, rows: int, values: int) -> int:
    """How many splits of `rows` queries with `values` values a program merges at once: all of `most` if they are few
    bytes, else about as many as there will be bunches.

    >>> bunch_for(16, 4, 128), bunch_for(66, 6, 128)
    (16, 8)
    """
    if most * rows * (values + TAIL.value) * 4 <= MERGE_BYTES:
        return triton.next_power_of_2(most)
    return 1 << round(math.log2(most) / 2)


@dataclass(frozen=True)
class Division:
    """How a launch divides the visible tokens of its rows.

    wanted   splits that it aims at
    items    programs per group of queries; some may have no split
    bunch    splits that are merged at once
    parts    where partial results are stored, [groups, 2 · items, queries, values + TAIL]; any tensor if not divided
    """

    rows: int
    wanted: int
    items: int
    bunch: int
    parts: Tensor

    @classmethod
    def of(cls, rows: int, groups: int, queries: int, values: int, wanted: int, out: Tensor) -> Division:
        """For `rows` rows of `groups` groups, each of `queries` queries with `values` values; `out` is the output."""
        items = max(wanted, rows + wanted // 2)  # many rows leave items for one that is longer
        bunch = bunch_for(items - rows + 1, queries, values)
        if wanted == 1 or groups * 2 * items > COUNTERS:  # this many groups fill the device undivided
            return cls(rows, 1, rows, bunch, out)
        parts = torch.empty(groups, 2 * items, queries, values + TAIL.value, device=out.device)
        return cls(rows, wanted, items, bunch, parts)

    def constants(self, queries: int, values: int, warps: int) -> dict[str, Any]:
        """The constants with which a kernel finds its split, and merges tiles of `queries` by `values`."""
        most = self.items - self.rows + 1  # splits of one row
        chunk = max(1, min(self.bunch, 8, 2048 * warps // (queries * values)))  # larger chunks compile very slowly
        return dict(
            B=triton.next_power_of_2(self.rows), MERGES=most > 1, BUNCH=self.bunch, TREE=most > self.bunch, CHUNK=chunk
        )
