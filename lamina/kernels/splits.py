"""What attention kernels share: which tokens a row can see, how they are divided over programs, and the merging.

A row's visible tokens are made one list without gaps, the kept first tokens and then those inside the window, whatever
the store: `slot_of` finds the slot of the j-th. The list is cut into equal parts of at least `least` tokens, as many as
the row's own length asks for and at most as many as the grid has programs; a program past them exits at once. So a
launch that was captured once fits every length, and slots that nobody sees are never read.

Each program keeps, for each of its queries, the largest score (`top`), the sum of shares relative to it (`total`) and
the sum of values weighted by them (`mix`). Two such triples merge into one: scale both to the larger top, add. Scores
are in powers of two. A part is written as a row of `mix | top | total | 2 unused`, aligned to 16 bytes.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.errors import InputError
from lamina.kernels import INTERPRETED
from lamina.kernels.launch import begin, launch_options, pdl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)  # a top below every score; finite, so that differences of two are never NaN
NEW = tl.constexpr(16)  # new tokens a row may have
TAIL = tl.constexpr(4)  # numbers of a part behind its mix
MOST_GROUPS = 1 << 16
MERGE_BYTES = 1 << 17  # of parts that one program may merge; with more, a second kernel does it faster


# -- what a row sees -------------------------------------------------------------------------------------------------


@triton.jit
def row_of(table, row, T: tl.constexpr):
    """How many tokens the row holds, and how many of the T new ones are real.

    Both were set by an earlier pass, so kernels read them before `begin`: the kernel just before them does not write
    them, and the ones before that are over when a kernel starts.
    """
    lengths, counts = tl.load(table + 5).to(tl.pointer_type(tl.int64)), tl.load(table + 6)
    length = tl.load(lengths + row)
    count = tl.load(counts.to(tl.pointer_type(tl.int64)) + row, mask=counts != 0, other=T)
    return length.to(tl.int32), count.to(tl.int32)


@triton.jit
def first_seen(position, size, KIND: tl.constexpr):
    """The first position inside the window of a query at `position` (kept ones aside)."""
    if KIND == "sliding":
        first = tl.maximum(position - size + 1, 0)
    elif KIND == "chunked":
        first = position // size * size
    else:
        first = position * 0
    return first


@triton.jit
def visible(table, length, count, size, keep, KIND: tl.constexpr):
    """The list of committed tokens that some new token sees: the first `kept` ones, then `first` … length - 1."""
    ring = tl.load(table + 3).to(tl.int32)
    ring = tl.where(ring == 0, 1 << 30, ring)  # a line is a ring that never wraps
    kept = tl.minimum(keep, length)
    first = tl.maximum(first_seen(length, size, KIND), kept)
    first = tl.maximum(first, length - ring)
    many = tl.where(count > 0, kept + length - first, 0)
    return kept, first, many, ring


@triton.jit
def position_of(j, kept, first):
    """The position of the j-th visible token."""
    return tl.where(j < kept, j, first + j - kept)


@triton.jit
def slot_of(j, kept, first, ring, keep):
    """The slot of the j-th visible token. The list wraps at most once, so no division per token."""
    around = (first - keep) % ring + j - kept
    around = tl.where(around >= ring, around - ring, around)
    return tl.where(j < kept, j, keep + around)


@triton.jit
def cut(many, most, least, BLOCK: tl.constexpr):
    """How many tokens each part has and how many parts there are; at least one, for the new tokens."""
    wanted = tl.maximum(tl.minimum(most, tl.cdiv(many, least)), 1)
    each = tl.maximum(tl.cdiv(tl.cdiv(many, wanted), BLOCK), 1) * BLOCK
    return each, tl.maximum(tl.cdiv(many, each), 1)


# -- arithmetic ------------------------------------------------------------------------------------------------------


@triton.jit
def scored(products, scale, softcap, SOFTCAP: tl.constexpr):
    scores = products * scale
    if SOFTCAP:  # tanh by exp: right at both ends, and to rounding between
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    return scores * LOG2E


@triton.jit
def fold(top, total, mix, scores, seen, values):
    """Takes more keys in: scores and seen [M, N], values [N, DV]."""
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    shares, fade = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
    total = total * fade + tl.sum(shares, axis=1)
    mix = tl.dot(shares.to(values.dtype), values, mix * fade[:, None], input_precision="ieee")
    return higher, total, mix


@triton.jit
def write(
    out, top, total, mix, sinks, row, head, r, d, count,
    T: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The finished queries r of a key head into out [B, T, HEADS * G, DV]; zeros for padding and empty rows."""
    t, h = r % T, head * G + r // T
    if SINKS:  # one more key, with no value
        sink = tl.load(sinks + h, mask=r < G * T, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
        mix = mix * tl.exp2(top - higher)[:, None]
    mean = mix / tl.where(total > 0, total, 1.0)[:, None]
    mean = tl.where(((t < count) & (total > 0))[:, None], mean, 0.0)
    at = ((row * T + t) * HEADS * G + h)[:, None] * DV + d[None, :]
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=(r < G * T)[:, None] & (d < DV)[None, :])


# -- merging ---------------------------------------------------------------------------------------------------------


@triton.jit
def leave(parts, top, total, mix, group, split, most, r, d, ROWS: tl.constexpr, DV: tl.constexpr):
    """Writes one part: parts [groups, most, ROWS, DV + TAIL], r counted inside the block of queries."""
    at = ((group.to(tl.int64) * most + split) * ROWS + r) * (DV + TAIL)
    tl.store(parts + at[:, None] + d[None, :], mix, mask=(r < ROWS)[:, None] & (d < DV)[None, :])
    tl.store(parts + at + DV, top, mask=r < ROWS)
    tl.store(parts + at + DV + 1, total, mask=r < ROWS)


@triton.jit
def merge(
    parts, group, used, most, r, d, ROWS: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Merges the parts of the queries r [R], columns d [C], CHUNK parts at a time so that their loads overlap."""
    top, total, mix = tl.full([R], NOTHING, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, C], tl.float32)
    for start in range(0, used, CHUNK):
        s = start + tl.arange(0, CHUNK)
        there = (s < used)[:, None] & (r < ROWS)[None, :]
        at = ((group.to(tl.int64) * most + s)[:, None] * ROWS + r[None, :]) * (DV + TAIL)  # [CHUNK, R]
        # Written by other programs of this launch: read past the first-level cache.
        tops = tl.load(parts + at + DV, mask=there, other=NOTHING, cache_modifier=".cg")
        totals = tl.load(parts + at + DV + 1, mask=there, other=0.0, cache_modifier=".cg")
        inside = there[:, :, None] & (d < DV)[None, None, :]
        mixes = tl.load(parts + at[:, :, None] + d[None, None, :], mask=inside, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, axis=0))
        share, fade = tl.exp2(tops - higher[None, :]), tl.exp2(top - higher)
        total = total * fade + tl.sum(totals * share, axis=0)
        mix = mix * fade[:, None] + tl.sum(mixes * share[:, :, None], axis=0)
        top = higher
    return top, total, mix


@triton.jit
def _merge(
    out, parts, sinks, table, size, keep, least, most,
    T: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    SINKS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One query and C columns a program. A row with a single part has been written already."""
    group, r = tl.program_id(0) // ROWS, tl.program_id(0) % ROWS + tl.arange(0, 1)
    row, head, block = group // (HEADS * QUERIES), group // QUERIES % HEADS, group % QUERIES
    length, count = row_of(table, row, T)
    _kept, _first, many, _ring = visible(table, length, count, size, keep, KIND)
    _each, used = cut(many, most, least, BLOCK)
    begin(PDL)
    if used > 1:
        d = tl.program_id(1) * C + tl.arange(0, C)
        top, total, mix = merge(parts, group, used, most, r, d, ROWS, DV, 1, C, CHUNK)
        write(out, top, total, mix, sinks, row, head, block * ROWS + r, d, count, T, G, HEADS, DV, SINKS)


def merge_parts(
    out: Tensor,  # [B, T, HEADS * G, DV]
    parts: Tensor,  # [groups, most, ROWS, DV + TAIL]
    sinks: Tensor | None,
    table: Tensor,
    window: tuple[str, int, int],
    *,
    heads: int,
    queries: int,
    least: int,
    block: int,
) -> None:
    """The second kernel, for parts that are too many numbers for one program."""
    groups, most, rows, width = parts.shape
    kind, size, keep = window
    values = width - TAIL.value
    columns = min(triton.next_power_of_2(values), 128)
    _merge[(groups * rows, triton.cdiv(values, columns))](
        out, parts, out if sinks is None else sinks, table, size, keep, least, most,
        T=out.shape[1], G=out.shape[2] // heads, HEADS=heads, DV=values, ROWS=rows, QUERIES=queries,
        SINKS=sinks is not None, KIND=kind, BLOCK=block, C=columns, CHUNK=min(triton.next_power_of_2(most), 64),
        PDL=pdl(), num_warps=4, **launch_options(),
    )  # fmt: skip


# -- the host's part -------------------------------------------------------------------------------------------------


def rule_of(window: Window) -> tuple[str, int, int]:
    """A window as kernels take it: its kind, size and how many first tokens it keeps.

    >>> rule_of(Sliding(8, keep=2))
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


def reach(window: Window) -> int | None:
    """The most tokens a query can see; None where there is no end to them."""
    return None if window.span is None else window.span + rule_of(window)[2]


@cache
def multiprocessors() -> int:
    return 132 if INTERPRETED else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def least_tokens(groups: int) -> int:
    """The shortest part worth a program: short while programs are few, long once they fill the device anyway."""
    return 256 if groups < multiprocessors() else 4096


def splits_for(rows: int, key_heads: int, slots: int | None, *, waves: int = 1, least: int | None = None) -> int:
    """How many parts a launch should have room for: `waves` programs for each multiprocessor, and with many rows still
    some for a row that is much longer than the others. `slots`: the most tokens a row can see, None where not known.

    >>> splits_for(1, 8, 128), splits_for(32, 8, 4096)
    (1, 1)
    """
    groups = rows * key_heads
    room = max(waves * multiprocessors() // groups, 4)
    return room if slots is None else max(1, min(room, triton.cdiv(slots, least or least_tokens(groups))))


@cache
def arrivals(device: torch.device) -> Tensor:
    """Counts the programs of a group that are done: zero before every launch, since the last one sets it back.

    Shared by all launches of a device, which must follow each other on one stream. Made at first use, which may not be
    inside a capture: its zeros would be part of the graph.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InputError("call an attention kernel once before capturing it: the first call allocates its counters")
    return torch.zeros(MOST_GROUPS, dtype=torch.int32, device=device)


def merges_itself(groups: int, most: int, rows: int, values: int) -> bool:
    """Whether a group's last program merges, instead of a kernel of its own."""
    return groups <= MOST_GROUPS and most * rows * (values + TAIL.value) * 4 <= MERGE_BYTES
