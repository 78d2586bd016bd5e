"""A cache entry as kernels read it: one row of the int64 table that `columns.ENTRY` declares.

`table` is a pointer to that row, so `tl.load(table + SLOTS)` reads one column. Each constant is the index of its
column. Lengths and counts were written by an earlier pass, and the table by the host, so kernels read all of them
before `begin`: the launch just before does not write them, and the launches before that one have finished.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.columns import ENTRY

K_STORE, V_STORE = tl.constexpr(ENTRY.index("k")), tl.constexpr(ENTRY.index("v"))
STORE = K_STORE  # of entries with one field: latents, inputs of a convolution, states
SLOTS, RING, KEEP = (tl.constexpr(ENTRY.index(name)) for name in ("slots", "ring", "keep"))
LENGTHS, COUNTS = tl.constexpr(ENTRY.index("lengths")), tl.constexpr(ENTRY.index("counts"))
PAGES, PAGES_PER_ROW = tl.constexpr(ENTRY.index("pages")), tl.constexpr(ENTRY.index("pages_per_row"))
K_SCALES, V_SCALES = tl.constexpr(ENTRY.index("k.scales")), tl.constexpr(ENTRY.index("v.scales"))
K_HIGH, V_HIGH = tl.constexpr(ENTRY.index("k.high")), tl.constexpr(ENTRY.index("v.high"))

SCORES, SCORE_ROOM = tl.constexpr(ENTRY.index("scores")), tl.constexpr(ENTRY.index("score_room"))
SLACK, BASES, BASE = (tl.constexpr(ENTRY.index(name)) for name in ("slack", "bases", "base"))
LOG = tl.constexpr(ENTRY.index("log.0"))


@triton.jit
def store_pointer(table, COLUMN: tl.constexpr, pointer_type: tl.constexpr):
    """The pointer in a column, aligned to 16 bytes. A pointer that is read from memory carries no alignment by itself;
    with it, loads and stores move 16 bytes at a time."""
    return tl.multiple_of(tl.multiple_of(tl.load(table + COLUMN), 16).to(pointer_type), 16)


@triton.jit
def lengths_of(table):
    """Pointer to the committed tokens of each row, int64 [B]."""
    return tl.load(table + LENGTHS).to(tl.pointer_type(tl.int64))


@triton.jit
def count_of(counts, row, T):
    """How many of the row's T new tokens are real; `counts` is what the COUNTS column holds."""
    return tl.load(counts.to(tl.pointer_type(tl.int64)) + row, mask=counts != 0, other=T).to(tl.int32)


@triton.jit
def row_of(table, row, T: tl.constexpr):
    """-> (committed tokens of the row, how many of its T new tokens are real)."""
    lengths, counts = lengths_of(table), tl.load(table + COUNTS)
    length = tl.load(lengths + row)
    count = tl.load(counts.to(tl.pointer_type(tl.int64)) + row, mask=counts != 0, other=T)
    return length.to(tl.int32), count.to(tl.int32)
