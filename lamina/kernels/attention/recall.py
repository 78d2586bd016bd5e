"""Token vectors that model code reads back as they are: one part of the committed tokens that a row's new tokens see.

A part is what a codec stores of a vector (codes, scales …), or the vector itself. It is copied as it is, out of lines,
rings and pages, in the order of positions. The reference is `lamina.cache.layers.tokens.TokenLayer.extend`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.window import Window
from lamina.kernels.attention.rope_append import cell_at
from lamina.kernels.attention.visible import position_of, slot_of, visible, window_arguments
from lamina.kernels.columns import ENTRY_AT
from lamina.kernels.entry import row_of, store_pointer
from lamina.kernels.launch import begin, launch

VALUES = 4096  # of a program's tile


def recall_part(
    table: Tensor, column: str, rows: int, room: int, width: int, dtype: torch.dtype, window: Window, page: int = 0
) -> tuple[Tensor, Tensor]:
    """-> (the part [rows, room, width] of the tokens that each row's new ones see, followed by zeros; their positions
    int64 [rows, room], followed by -1)

    column   of the table, that points to the part
    room     tokens: at least as many as the new ones of any row see
    """
    out = torch.empty(rows, room, width, dtype=dtype, device=table.device)
    positions = torch.empty(rows, room, dtype=torch.int64, device=table.device)
    kind, size, keep = window_arguments(window)
    wide = min(triton.next_power_of_2(width), 1024)
    tokens = min(triton.next_power_of_2(room), max(VALUES // wide, 1))
    launch(
        _recall, (triton.cdiv(room, tokens), rows),
        out, positions, table, size, keep, room, KIND=kind, COLUMN=ENTRY_AT[column], WIDTH=width, WIDE=wide,
        TOKENS=tokens, PAGE=page, num_warps=4,
    )  # fmt: skip
    return out, positions


@triton.jit
def _recall(
    out, positions, table,  # [R, ROOM, WIDTH], [R, ROOM]; the entry's table row
    size, keep, ROOM,  # of the window; tokens
    KIND: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, row): tokens i · TOKENS … of those that the row's new tokens see, WIDE values at a time."""
    begin(PDL)
    row = tl.program_id(1).to(tl.int64)
    length, count = row_of(table, row, 1)
    kept, first, seen, ring = visible(table, length, count, size, keep, KIND)
    j = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = j < seen
    slot = tl.where(there, slot_of(j, kept, first, ring, keep, KIND), 0)
    cell = cell_at(table, row, 0, slot, there, 1, PAGE).to(tl.int64)
    store = store_pointer(table, COLUMN, out.dtype)
    for start in range(0, WIDTH, WIDE):
        d = start + tl.arange(0, WIDE)
        inside = (d < WIDTH)[None, :]
        values = tl.load(store + cell[:, None] * WIDTH + d[None, :], mask=there[:, None] & inside, other=0)
        tl.store(out + (row * ROOM + j)[:, None] * WIDTH + d[None, :], values, mask=(j < ROOM)[:, None] & inside)
    at = tl.where(there, position_of(j, kept, first), -1).to(tl.int64)
    tl.store(positions + row * ROOM + j, at, mask=j < ROOM)
