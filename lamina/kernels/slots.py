"""The address of a slot in a store, with or without pages.

A store is an array of cells, one per slot and head, each of a fixed number of values. Without pages it is [B, HEADS, S]
cells. With pages it is [1 + pages, HEADS, PAGE] cells, and a page table int32 [B, pages_per_row] has each row's pages.

    cell without pages    (row · HEADS + head) · S + slot
    cell with pages       (page_table[row, slot // PAGE] · HEADS + head) · PAGE + slot % PAGE

PAGE is a constant of the kernel, 0 without pages, so such a kernel has no trace of them. The host writes a page table
before a pass is launched, so kernels read it before `begin`. The reference is
`lamina.cache.storage.paged.PagedStorage`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.entry import PAGES, PAGES_PER_ROW, SLOTS


@triton.jit
def first_cell(table, row_head, PAGE: tl.constexpr):
    """The cell from which `cell_of` counts, for row_head = row · HEADS + head: its first cell; 0 with pages."""
    if PAGE:
        return 0
    else:
        return row_head.to(tl.int64) * tl.load(table + SLOTS)


@triton.jit
def pages_of(table, row, PAGE: tl.constexpr):
    """Pointer to the row's pages in the page table; not used without pages."""
    if PAGE:
        return tl.load(table + PAGES).to(tl.pointer_type(tl.int32)) + row * tl.load(table + PAGES_PER_ROW)
    else:
        return table


@triton.jit
def cell_of(pages, head, slot, there, HEADS: tl.constexpr, PAGE: tl.constexpr):
    """The cells of slots, counted from `first_cell`; any cell where not `there`."""
    if PAGE:
        page = tl.load(pages + slot // PAGE, mask=there, other=0).to(tl.int64)
        return (page * HEADS + head) * PAGE + slot % PAGE
    else:
        return slot


@triton.jit
def cells_in(
    pages, head, slot, start, end, HEADS: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The cells of one block: tokens start … start + BLOCK - 1 of a row's visible tokens, in these slots [BLOCK]; any
    cells from token `end` on.

    A block of a line begins at a multiple of BLOCK (`split_kv.divide`). So it is inside one page or is several whole
    pages, and few entries of the page table have to be loaded.
    """
    FEW: tl.constexpr = KIND == "full" and PAGE > 0 and (PAGE % max(BLOCK, 1) == 0 or BLOCK % max(PAGE, 1) == 0)
    if FEW and BLOCK <= 4 * PAGE:
        entries = pages + start // PAGE
        page = tl.load(entries, mask=start < end, other=0)
        for i in tl.static_range(1, BLOCK // PAGE):
            more = tl.load(entries + i, mask=start + i * PAGE < end, other=0)
            page = tl.where(slot >= start + i * PAGE, more, page)
        return (page.to(tl.int64) * HEADS + head) * PAGE + slot % PAGE
    else:
        return cell_of(pages, head, slot, start + tl.arange(0, BLOCK) < end, HEADS, PAGE)


def stages_for(stages: int, page: int) -> int:
    """Pipeline stages of a loop over pages with as many blocks in flight as `stages` give without pages: the page
    numbers are loaded first, and take as long.

    >>> stages_for(3, page=0), stages_for(3, page=64)
    (3, 5)
    """
    return 2 * stages - 1 if page else stages
