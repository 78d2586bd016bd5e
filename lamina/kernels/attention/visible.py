"""Which committed tokens of a row its new tokens see, and in which slots they are.

Attention kernels treat a row's visible tokens as one list without gaps, whatever the store: the first `kept` tokens
(attention sinks of a sliding window), then the tokens inside the window. `slot_of` gives the slot of the j-th token of
that list, so slots that no query sees are never read.

    positions    0 … kept-1 │ not visible │ first … length-1 │ length … (new tokens)
    list j       0 … kept-1 │             │ kept … n-1       │
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.errors import InputError
from lamina.kernels.entry import RING

MOST_NEW = tl.constexpr(16)  # new tokens that a row may have in one pass


@triton.jit
def first_seen(position, size, KIND: tl.constexpr):
    """The first position inside the window of a query at `position`, apart from kept tokens."""
    if KIND == "sliding":
        first = tl.maximum(position - size + 1, 0)
    elif KIND == "chunked":
        first = position // size * size
    else:
        first = position * 0
    return first


@triton.jit
def visible(table, length, count, size, keep, KIND: tl.constexpr):
    """The committed tokens that some new token sees: -> (kept, first, tokens in the list, slots of the ring)."""
    ring = tl.load(table + RING).to(tl.int32)
    ring = tl.where(ring == 0, 1 << 30, ring)  # a line is a ring that never wraps
    kept = tl.minimum(keep, length)
    first = tl.maximum(first_seen(length, size, KIND), kept)
    first = tl.maximum(first, length - ring)
    n_visible = tl.where(count > 0, kept + length - first, 0)
    return kept, first, n_visible, ring


@triton.jit
def position_of(j, kept, first):
    """The position of the j-th visible token."""
    return tl.where(j < kept, j, first + j - kept)


@triton.jit
def slot_of(j, kept, first, ring, keep, KIND: tl.constexpr):
    """The slot of the j-th visible token. The list wraps around the ring at most once, so one division per block is
    enough. Without a window every token of a line is visible, in the slot of its position."""
    if KIND == "full":
        return j
    around = (first - keep) % ring + j - kept
    around = tl.where(around >= ring, around - ring, around)
    return tl.where(j < kept, j, keep + around)


# -- on the host -----------------------------------------------------------------------------------------------------


def window_arguments(window: Window) -> tuple[str, int, int]:
    """A window as kernels take it: (kind, size, first tokens that it keeps).

    >>> window_arguments(Sliding(8, keep=2))
    ('sliding', 8, 2)
    """
    match window:
        case Full():
            return "full", 1, 0
        case Sliding(size=size, keep=keep):
            return "sliding", size, keep
        case Chunked(size=size):
            return "chunked", size, 0
    raise InputError(f"the attention kernels know Full, Sliding and Chunked, not {window}: use lamina.attention")


def most_visible(window: Window) -> int | None:
    """The most tokens that a query can see; None without a limit."""
    return None if window.span is None else window.span + window_arguments(window)[2]
