"""Online softmax of attention kernels, and the merge of its partial results across programs.

A program keeps per query the largest score so far (`top`), the sum of exp2(score - top) (`total`) and the sum of values
weighted by the same (`mix`). Two such triples merge into one: rescale both to the larger top, then add. Scores are in
powers of two: they are multiplied by log2(e) once, and exp2 is one instruction.

The triples of the splits of a row (see `split_kv.py`) are merged by the programs that computed them (`merge_splits`),
so there is no second launch. They form a tree of two levels: the program that completes a *bunch* of splits merges it,
the one that completes the last bunch merges the bunches. Which program that is varies, but not which triples are merged
in which order, so results repeat bit for bit.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # a top below every score; finite, so that a difference of two is never NaN
TAIL = tl.constexpr(4)  # values after the mix of a stored triple: top, total, 2 unused; keeps 16-byte alignment


# -- one program -----------------------------------------------------------------------------------------------------


@triton.jit
def to_scores(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Products q·k to scores in powers of two."""
    scores = products * scale
    if SOFTCAP:  # tanh by exp: exact at both ends, and to rounding between
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    return scores * LOG2E


@triton.jit
def accumulate(top, total, mix, scores, seen, values):
    """Adds N keys to the triples: top and total [M], mix [M, DV], scores and seen [M, N], values [N, DV]."""
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    probs, rescale = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
    total = total * rescale + tl.sum(probs, axis=1)
    mix = tl.dot(probs.to(values.dtype), values, mix * rescale[:, None], input_precision="ieee")
    return higher, total, mix


@triton.jit
def accumulate_one(top, total, mix, scores, seen, values):
    """The same for one query, without tensor cores: top and total [1], mix [1, DV], scores and seen [N]."""
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=0))
    probs, rescale = tl.exp2(scores - tl.sum(higher, axis=0)), tl.exp2(top - higher)
    total = total * rescale + tl.sum(probs, axis=0)
    mix = mix * rescale[:, None] + tl.sum(probs[:, None] * values.to(tl.float32), axis=0)[None, :]
    return higher, total, mix


@triton.jit
def store_output(
    out, top, total, mix,  # [B, T, HEADS · G, DV]; the finished triples of queries r
    sinks, gate, gate_head,  # [HEADS · G]; the row's gate [HEADS · G, DV] and its stride
    row, head, r, d, count,  # key head; queries r = g · T + t of that head; columns d of the values
    T: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Divides the mix by the total and stores it; zeros for padding and for rows that see nothing.

    SINKS: the softmax has one more key per head, with this score and no value. GATE: the output is multiplied by the
    sigmoid of the gate, which is for one token per row.
    """
    t, h = r % T, head * G + r // T
    if SINKS:
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


# -- across programs -------------------------------------------------------------------------------------------------


@triton.jit
def store_split(parts, top, total, mix, place, r, d, ROWS: tl.constexpr, DV: tl.constexpr):
    """Stores the triples of one split: parts [places, ROWS, DV + TAIL], queries r counted inside their block."""
    at = (place * ROWS + r) * (DV + TAIL)
    tl.store(parts + at[:, None] + d[None, :], mix, mask=(r < ROWS)[:, None] & (d < DV)[None, :])
    tl.store(parts + at + DV, top, mask=r < ROWS)
    tl.store(parts + at + DV + 1, total, mask=r < ROWS)


@triton.jit
def arrive(counter, expected):
    """Counts this program's split as stored; -> whether it was the last of those expected. The last resets to 0."""
    tl.debug_barrier()  # every thread of the program has stored before one thread counts
    last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merge(
    parts, place, n_parts, r, d, ROWS: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Merges `n_parts` stored splits from `place` on, for queries r [R] and columns d [C] -> top, total, mix.

    The loads of CHUNK splits are issued together.
    """
    top, total, mix = tl.full([R], LOWEST, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, C], tl.float32)
    for start in range(0, n_parts, CHUNK):
        for i in tl.static_range(CHUNK):
            there = (r < ROWS) & (start + i < n_parts)
            at = parts + ((place + start + i) * ROWS + r) * (DV + TAIL)
            # Other programs of this launch wrote these: read them from L2, past the L1 cache.
            part_top = tl.load(at + DV, mask=there, other=LOWEST, cache_modifier=".cg")
            part_total = tl.load(at + DV + 1, mask=there, other=0.0, cache_modifier=".cg")
            inside = there[:, None] & (d < DV)[None, :]
            part_mix = tl.load(at[:, None] + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(top, part_top)
            rescale, prob = tl.exp2(top - higher), tl.exp2(part_top - higher)
            total = total * rescale + part_total * prob
            mix = mix * rescale[:, None] + part_mix * prob[:, None]
            top = higher
    return top, total, mix


@triton.jit
def merge_at_once(parts, place, n_parts, d, N: tl.constexpr, DV: tl.constexpr):
    """The same for one query and up to N splits, all loaded together -> top [1], total [1], mix [1, C]."""
    i = tl.arange(0, N)
    there = i < n_parts
    at = parts + (place + i) * (DV + TAIL)
    tops = tl.load(at + DV, mask=there, other=LOWEST, cache_modifier=".cg")
    totals = tl.load(at + DV + 1, mask=there, other=0.0, cache_modifier=".cg")
    inside = there[:, None] & (d < DV)[None, :]
    mixes = tl.load(at[:, None] + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")  # [N, C]
    top = tl.max(tops, axis=0)
    weights = tl.exp2(tops - top)
    one = tl.zeros([1], tl.float32)
    return one + top, one + tl.sum(totals * weights, axis=0), tl.sum(mixes * weights[:, None], axis=0)[None, :]


@triton.jit
def merge_splits(
    parts, counters,  # [groups, 2 · items, ROWS, DV + TAIL] float32; int32, zero before and after
    top, total, mix,  # of this program's queries `inner`
    group, base, split, n_splits,  # group of queries; the row's first item; this split and how many the row has
    inner, n, d,  # queries of this program [M]; queries to merge [R]; columns [C]
    ROWS: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BUNCH: tl.constexpr, TREE: tl.constexpr,
    CHUNK: tl.constexpr, AT_ONCE: tl.constexpr = False,  # one query, whose bunches are merged at once
):  # fmt: skip
    """Stores this program's split and merges what it completes.

    -> (whether that is every split of the row's group, and if so top, total and mix of its queries n)

    A group's splits are stored at the places of its items, its merged bunches after all items.
    """
    items, bunch = tl.num_programs(1), split // BUNCH
    first = group * (2 * items) + base
    place = first.to(tl.int64)
    store_split(parts, top, total, mix, place + split, inner, d, ROWS, DV)
    counters += first
    in_bunch = tl.minimum(n_splits - bunch * BUNCH, BUNCH)
    last = arrive(counters + bunch, in_bunch)
    best, sums, mixed = tl.full([R], LOWEST, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, C], tl.float32)
    if last:
        if AT_ONCE:
            best, sums, mixed = merge_at_once(parts, place + bunch * BUNCH, in_bunch, d, BUNCH, DV)
        else:
            best, sums, mixed = merge(parts, place + bunch * BUNCH, in_bunch, n, d, ROWS, DV, R, C, CHUNK)
        if TREE:
            bunches = tl.cdiv(n_splits, BUNCH)
            if bunches > 1:
                store_split(parts, best, sums, mixed, place + items + bunch, n, d, ROWS, DV)
                last = arrive(counters + items, bunches)
                if last:
                    best, sums, mixed = merge(parts, place + items, bunches, n, d, ROWS, DV, R, C, CHUNK)
    return last, best, sums, mixed
