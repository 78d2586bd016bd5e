"""Where the numbers of a slot lie.

A store is cells of so many numbers each, one for a slot of a head: [B, HEADS, S] of them, or in pages
[1 + pages, HEADS, PAGE], with a table [B, places] of each row's pages.

    (row · HEADS + head) · slots + slot
    (pages[row, slot // PAGE] · HEADS + head) · PAGE + slot % PAGE

PAGE is known when a kernel is built, and 0 where there are no pages: then nothing of them is left in it. The host
writes a table of pages before a pass is launched, so kernels read it before `begin`. The reference is
`lamina.cache.storage.paged.PagedStorage`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lamina.kernels.entry import PAGES, PAGES_PER_ROW, SLOTS


@triton.jit
def first_cell(table, group, PAGE: tl.constexpr):
    """What the cells of group row · HEADS + head are counted from: its first one; with pages, the store's."""
    if PAGE:
        return 0
    else:
        return group.to(tl.int64) * tl.load(table + SLOTS)


@triton.jit
def pages_of(table, row, PAGE: tl.constexpr):
    """The row's places in the table of pages; nothing of use without pages."""
    if PAGE:
        return tl.load(table + PAGES).to(tl.pointer_type(tl.int32)) + row * tl.load(table + PAGES_PER_ROW)
    else:
        return table


@triton.jit
def cell_of(pages, head, slot, there, HEADS: tl.constexpr, PAGE: tl.constexpr):
    """The cells of slots, counted from `first_cell`; any where they are not `there`."""
    if PAGE:
        page = tl.load(pages + slot // PAGE, mask=there, other=0).to(tl.int64)
        return (page * HEADS + head) * PAGE + slot % PAGE
    else:
        return slot


@triton.jit
def cells_in(
    pages, head, slot, start, end, HEADS: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The cells of a block, the tokens start … start + BLOCK - 1 of what a row sees, in these slots [BLOCK]; any from
    token `end` on.

    A block of a line begins at a multiple of BLOCK (`splits.cut`). So it lies in one page or in some whole ones, and
    there are few numbers to look up.
    """
    FEW: tl.constexpr = KIND == "full" and PAGE > 0 and (PAGE % max(BLOCK, 1) == 0 or BLOCK % max(PAGE, 1) == 0)
    if FEW and BLOCK <= 4 * PAGE:
        places = pages + start // PAGE
        page = tl.load(places, mask=start < end, other=0)
        for i in tl.static_range(1, BLOCK // PAGE):
            more = tl.load(places + i, mask=start + i * PAGE < end, other=0)
            page = tl.where(slot >= start + i * PAGE, more, page)
        return (page.to(tl.int64) * HEADS + head) * PAGE + slot % PAGE
    else:
        return cell_of(pages, head, slot, start + tl.arange(0, BLOCK) < end, HEADS, PAGE)


def stages_for(stages: int, page: int) -> int:
    """The stages of a loop over pages that has as many blocks on their way as one of so many over a store in one
    piece: numbers of pages come first, and are on their way as long.

    >>> stages_for(3, page=0), stages_for(3, page=64)
    (3, 5)
    """
    return 2 * stages - 1 if page else stages
