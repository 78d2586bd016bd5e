"""What attention kernels share: which tokens a row can see, how they are divided over programs, and the merging.

A row's visible tokens are made one list without gaps, the kept first tokens and then those inside the window, whatever
the store: `slot_of` finds the slot of the j-th. Lists are cut into parts of about the same size in all rows, as short
as gives each part a program; a row's own parts are equal, and of `least` tokens or more. Every program computes that
for itself, on the device (`part_of`); one that finds no part left exits at once. So a launch that was captured once
fits every length, a long row among short ones is many parts, and slots that nobody sees are never read.

Each program keeps, for each of its queries, the largest score (`top`), the sum of shares relative to it (`total`) and
the sum of values weighted by them (`mix`). Two such triples merge into one: scale both to the larger top, add. Scores
are in powers of two. A part is written as a row of `mix | top | total | 2 unused`, aligned to 16 bytes.

Parts are merged by the programs that made them (`gathered`), in a tree of two levels: a program that completes a bunch
of parts merges the bunch, one that completes the bunches merges those. Chance decides who that is, but not what is
merged with what, so results repeat bit for bit. Beside other rows a row may be cut elsewhere, and differ by a rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.errors import InputError
from lamina.kernels.entry import RING, row_of
from lamina.kernels.launch import fetch_ahead
from lamina.kernels.limits import Limits
from lamina.kernels.workspace import COUNTERS

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)  # a top below every score; finite, so that differences of two are never NaN
NEW = tl.constexpr(16)  # new tokens a row may have
TAIL = tl.constexpr(4)  # numbers of a part behind its mix
MERGE_BYTES = 1 << 16  # of parts that one program merges at once; with more, two levels are faster


# -- what a row sees -------------------------------------------------------------------------------------------------


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
    ring = tl.load(table + RING).to(tl.int32)
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
def slot_of(j, kept, first, ring, keep, KIND: tl.constexpr):
    """The slot of the j-th visible token. The list wraps at most once, so no division per token; all of a line is
    visible to who has no window."""
    if KIND == "full":
        return j
    around = (first - keep) % ring + j - kept
    around = tl.where(around >= ring, around - ring, around)
    return tl.where(j < kept, j, keep + around)


@triton.jit
def cut(many, most, least, BLOCK: tl.constexpr):
    """How many tokens each part has and how many parts there are; at least one, for the new tokens."""
    wanted = tl.maximum(tl.minimum(most, tl.cdiv(many, least)), 1)
    each = tl.maximum(tl.cdiv(tl.cdiv(many, wanted), BLOCK), 1) * BLOCK
    return each, tl.maximum(tl.cdiv(many, each), 1)


@triton.jit
def size_of_parts(every, real, wanted, least):
    """How many tokens a part may have, where rows see `every` tokens: the least of a few sizes, from that of `wanted`
    equal parts on, for which the grid has programs enough; no limit where none is."""
    steps = tl.arange(0, 16)
    larger = tl.exp2((steps * steps).to(tl.float32) / 64)  # 1, 1.01, 1.04, 1.1 … 11
    size = tl.maximum((tl.sum(every).to(tl.float32) / wanted * larger).to(tl.int32) + 1, least)
    parts = tl.where(real[None, :], tl.maximum(tl.cdiv(every[None, :], size[:, None]), 1), 0)
    return tl.min(tl.where(tl.sum(parts, 1) <= tl.num_programs(1), size, 1 << 30))


@triton.jit
def part_of(
    table, rows, wanted, size, keep, least,
    T: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What this program of a grid (…, items) takes: of which row the part `split`, of `used` parts of `each` tokens,
    the first of which is item `base`; and the row's length, count and visible tokens. None where split >= used.

    wanted: into how many parts all that is seen is divided, about. ROWS: a power of two, as many as the rows or more.
    With several rows items are given out from the last one on: programs without a part begin first, and may be gone
    when the kernel in front ends.
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
        _kept, _first, every, _ring = visible(table, lengths, counts, size, keep, KIND)
        every = tl.where(real, every, 0)
        longest = size_of_parts(every, real, wanted, least)
        mosts = tl.where(real, tl.maximum(tl.cdiv(every, longest), 1), 0)
        stops = tl.cumsum(mosts, 0)
        row = tl.sum((stops <= item).to(tl.int32))  # rows whose parts all come before; past the last: no part is left
        mine = r == row
        most, base = tl.sum(tl.where(mine, mosts, 0)), tl.sum(tl.where(mine, stops - mosts, 0))
        length, count = tl.sum(tl.where(mine, lengths, 0)), tl.sum(tl.where(mine, counts, 0))
    kept, first, many, ring = visible(table, length, count, size, keep, KIND)
    each, used = cut(many, most, least, BLOCK)
    used = tl.where(most > 0, used, 0)
    return row, item - base, used, base, each, length, count, kept, first, many, ring


@triton.jit
def fetch(store, begins, ends, WIDTH: tl.constexpr):
    """Asks the tokens begins … ends - 1 of a line, WIDTH numbers each, into the L2 cache.

    What a cache held before this pass nobody writes, so a program may ask for it before `begin`.
    """
    if ends > begins:
        fetch_ahead(store + begins * WIDTH, (ends - begins) * (WIDTH * store.dtype.element_ty.primitive_bitwidth // 8))


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
    out, top, total, mix, sinks, gate, gate_head, row, head, r, d, count,
    T: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """The finished queries r of a key head into out [B, T, HEADS * G, DV]; zeros for padding and empty rows.

    GATE: they are multiplied by the sigmoid of the row's gate [HEADS * G, DV], for one token.
    """
    t, h = r % T, head * G + r // T
    if SINKS:  # one more key, with no value
        sink = tl.load(sinks + h, mask=r < G * T, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
        mix = mix * tl.exp2(top - higher)[:, None]
    mean = mix / tl.where(total > 0, total, 1.0)[:, None]
    mean = tl.where(((t < count) & (total > 0))[:, None], mean, 0.0)
    at = ((row * T + t) * HEADS * G + h)[:, None] * DV + d[None, :]
    inside = (r < G * T)[:, None] & (d < DV)[None, :]
    if GATE:
        mean *= tl.sigmoid(tl.load(gate + h[:, None] * gate_head + d[None, :], mask=inside, other=0.0).to(tl.float32))
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=inside)


# -- merging ---------------------------------------------------------------------------------------------------------


@triton.jit
def leave(parts, top, total, mix, place, r, d, ROWS: tl.constexpr, DV: tl.constexpr):
    """Writes one part: parts [places, ROWS, DV + TAIL], r counted inside the block of queries."""
    at = (place * ROWS + r) * (DV + TAIL)
    tl.store(parts + at[:, None] + d[None, :], mix, mask=(r < ROWS)[:, None] & (d < DV)[None, :])
    tl.store(parts + at + DV, top, mask=r < ROWS)
    tl.store(parts + at + DV + 1, total, mask=r < ROWS)


@triton.jit
def arrive(counter, expected):
    """Counts this program's part as written; whether it was the last of those expected."""
    tl.debug_barrier()  # every thread's numbers are written before one thread counts
    last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merge(
    parts, place, many, r, d, ROWS: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Merges `many` parts from `place` on: the queries r [R], columns d [C], the loads of CHUNK parts at a time."""
    top, total, mix = tl.full([R], NOTHING, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, C], tl.float32)
    for start in range(0, many, CHUNK):
        for i in tl.static_range(CHUNK):
            there = (r < ROWS) & (start + i < many)
            at = parts + ((place + start + i) * ROWS + r) * (DV + TAIL)
            # Written by other programs of this launch: read past the first-level cache.
            part_top = tl.load(at + DV, mask=there, other=NOTHING, cache_modifier=".cg")
            part_total = tl.load(at + DV + 1, mask=there, other=0.0, cache_modifier=".cg")
            inside = there[:, None] & (d < DV)[None, :]
            part_mix = tl.load(at[:, None] + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, part_top)
            fade, share = tl.exp2(top - higher), tl.exp2(part_top - higher)
            total = total * fade + part_total * share
            mix = mix * fade[:, None] + part_mix * share[:, None]
            top = higher
    return top, total, mix


@triton.jit
def gathered(
    parts, counters, top, total, mix, group, base, split, used, inner, n, d,
    ROWS: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BUNCH: tl.constexpr, TREE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Leaves this program's part (queries `inner`) and merges what it completes.

    -> whether that is the whole of the row's group; if so the top, total and mix of its queries n [R]
    group is one of those that every row has; its parts are at the places of its items, merged bunches behind all items.
    """
    items, bunch = tl.num_programs(1), split // BUNCH
    first = group * (2 * items) + base
    place = first.to(tl.int64)
    leave(parts, top, total, mix, place + split, inner, d, ROWS, DV)
    counters += first
    here = tl.minimum(used - bunch * BUNCH, BUNCH)
    last = arrive(counters + bunch, here)
    best, sums, mixed = tl.full([R], NOTHING, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, C], tl.float32)
    if last:
        best, sums, mixed = merge(parts, place + bunch * BUNCH, here, n, d, ROWS, DV, R, C, CHUNK)
        if TREE:
            sets = tl.cdiv(used, BUNCH)
            if sets > 1:
                leave(parts, best, sums, mixed, place + items + bunch, n, d, ROWS, DV)
                last = arrive(counters + items, sets)
                if last:
                    best, sums, mixed = merge(parts, place + items, sets, n, d, ROWS, DV, R, C, CHUNK)
    return last, best, sums, mixed


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


def least_tokens(block: int) -> int:
    """The shortest part worth a program. Where heads are so wide that blocks are small, walking along them takes longer
    than merging."""
    return 256 if block > 32 else 32


def parts_for(rows: int, heads: int, slots: int | None, least: int, multiprocessors: int, *, waves: int = 1) -> int:
    """Into how many parts a launch divides what all rows see: with `heads` programs each, `waves` programs for each
    multiprocessor. `slots`: the most tokens a row can see, None where not known.

    >>> parts_for(1, 8, 128, 256, 132), parts_for(1, 8, None, 256, 132), parts_for(32, 8, 512, 256, 132)
    (1, 16, 16)
    """
    room = max(waves * multiprocessors // heads, 1)
    return room if slots is None else max(1, min(room, triton.cdiv(rows * slots, least)))


def tokens_ahead(kind: str, token_bytes: int, block: int, limits: Limits) -> int:
    """How many tokens of its part a program asks for while the kernel in front is still at work: two blocks, where the
    device can and a part lies in one piece."""
    return 2 * block if limits.pdl and kind == "full" and token_bytes % 16 == 0 else 0


def bunch_for(most: int, rows: int, values: int) -> int:
    """How many parts of `rows` queries a program merges at once: all while they are few bytes, else about as many as
    there will be bunches.

    >>> bunch_for(16, 4, 128), bunch_for(66, 6, 128)
    (16, 8)
    """
    if most * rows * (values + TAIL.value) * 4 <= MERGE_BYTES:
        return triton.next_power_of_2(most)
    return 1 << round(math.log2(most) / 2)


@dataclass(frozen=True)
class Division:
    """How a launch divides what its rows see: into about `wanted` parts, with programs for so many `items`, merged
    `bunch` at a time.

    parts   where they are left [groups, 2 · items, queries, values + TAIL]; any tensor where nothing is divided
    """

    rows: int
    wanted: int
    items: int
    bunch: int
    parts: Tensor

    @classmethod
    def of(cls, rows: int, groups: int, queries: int, values: int, wanted: int, out: Tensor) -> Division:
        """For rows of so many groups of queries, with so many values each. `out` is what the launch gives."""
        items = max(wanted, rows + wanted // 2)  # rows that are many leave room for one that is long
        bunch = bunch_for(items - rows + 1, queries, values)
        if wanted == 1 or groups * 2 * items > COUNTERS:  # so many groups keep the device busy undivided
            return cls(rows, 1, rows, bunch, out)
        parts = torch.empty(groups, 2 * items, queries, values + TAIL.value, device=out.device)
        return cls(rows, wanted, items, bunch, parts)

    def constants(self, queries: int, values: int, warps: int) -> dict[str, Any]:
        """What a kernel must know of it to find its part, and to merge tiles of so many queries and values."""
        most = self.items - self.rows + 1  # of one row
        chunk = max(1, min(self.bunch, 8, 2048 * warps // (queries * values)))  # more takes the compiler very long
        return dict(
            B=triton.next_power_of_2(self.rows), MERGES=most > 1, BUNCH=self.bunch, TREE=most > self.bunch, CHUNK=chunk
        )
