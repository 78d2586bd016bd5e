"""Decode attention over codes: each code read once, and made a number in the registers that take part in the product.

The parts, the windows and the merging are those of `attend`. A program is one warp for every 16 queries and needs no
other: blocks are short, many programs share a multiprocessor, and nothing is exchanged between warps. Keys and values
are never whole: they stay in planes (see `packed`). New tokens are further tokens behind the visible ones, in their
slots or in parts of this pass alone (see `codes`), so one loop takes in all.

Matrix units take 16 rows and 8 columns at least. Tokens are the rows, of scores and, across, of values; the few queries
of a key head are the columns. The other way round, twice as many of the products would be padding. Scales and offsets
are asked for once: near as the second reading is, the way from the L2 cache is what limits all of it.

Everything happens in the space of the codes: with q made ready by `codes.encode`,

    q·k = q·centre + largest · Σ over groups (scale · q̂·codes + offset · Σ q̂)

and an output over turned values is turned back once, by the program that finishes it.

The reference is `lamina.attention.reference_attention` over what the codec's `decode` gives.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.window import Window
from lamina.cache.codec.registry import FormatName
from lamina.errors import InputError
from lamina.kernels.attention.rope_append import slot_at
from lamina.kernels.attention.shape import Shape
from lamina.kernels.attention.split_kv import (
    LOG2E,
    NEW,
    NOTHING,
    Division,
    first_seen,
    gathered,
    part_of,
    parts_for,
    position_of,
    reach,
    rule_of,
    scored,
    slot_of,
    write,
)
from lamina.kernels.eligibility import MOST_CODED
from lamina.kernels.entry import K_HIGH, K_SCALES, K_STORE, V_HIGH, V_SCALES, V_STORE, store_pointer
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, limits_of
from lamina.kernels.quant.encode import Coded, Parts, Side
from lamina.kernels.quant.layout import (
    GROUP,
    and_one,
    code_bytes,
    column_in,
    float_planes,
    group_words,
    groups_of,
    high_bytes,
    in_columns,
    number_at,
    numbered,
    offsets,
    padded_words,
    planes_in,
    planes_of,
    repeated,
    scale_numbers,
    turned,
    weight_of,
    within,
    word_bytes,
)
from lamina.kernels.slots import cells_in, first_cell, pages_of, stages_for
from lamina.kernels.workspace import arrivals

# By bits of a number that is computed with, and by columns of a value.
SHAPES = {(16, 64): Shape(32, 1, 3), (16, 128): Shape(32, 1, 3), (16, 256): Shape(16, 1, 3), (32, 256): Shape(16, 4, 2)}
FP8_BLOCK = 16  # tokens at a time, at most
# By the formats of keys and values, where heads of all rows leave multiprocessors free: what counts then is how soon a
# part is done, and how many there are to merge.
FEW = {(8, 8): Shape(64, 4, 3), ("fp8", "fp8"): Shape(64, 4, 3), (8, 4): Shape(64, 2, 3)}
MOST_QUERIES = {16: 64, 32: 16}
LEAST = 128  # tokens a part has at least
WAVES, WAVES_OF_FEW, WAVES_OF_FP8 = 8, 4, 16  # programs for each multiprocessor


@triton.jit
def store_of(table, COLUMN: tl.constexpr, new, first, WIDTH: tl.constexpr):
    """Where the cell `first` begins in the store of a part: WIDTH numbers each, of the type of `new`."""
    return store_pointer(table, COLUMN, new.dtype) + first * WIDTH


@triton.jit
def tokens_of(store, new, slot, u, WIDTH: tl.constexpr, APART: tl.constexpr):
    """Where the tokens' parts begin: in their slots, or APART in the pass's own, where u >= 0 numbers them."""
    at = store + slot * WIDTH
    if APART:
        at = tl.where(u < 0, at, new + u * WIDTH)
    return at


@triton.jit
def in_pairs(scales):
    """The same numbers as pairs of a scale and an offset, 32 bits each."""
    return scales.to(tl.pointer_type(tl.uint32), bitcast=True)


@triton.jit
def read(
    codes, scales, high, new_codes, new_scales, new_high, slot, u, there,
    D: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, APART: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """The planes of N tokens [N, words], and what goes with them: offsets of their groups [N, OFFSETS], or 256 times
    the scale of each token [N, 1] where planes are fp8. ACROSS: all of it with tokens along the other side; slot, u and
    there are so already."""
    WORDS: tl.constexpr = code_bytes(D, FORM) // max(1, word_bytes(D, FORM))
    PADDED: tl.constexpr = padded_words(D, FORM)
    w = numbered(PADDED, ACROSS)
    at_words = tokens_of(codes, new_codes, slot, u, WORDS, APART)
    words = tl.load(at_words + w, mask=within(there, w, WORDS, PADDED), other=0)
    if FORM == "plain":
        return (words,), words
    elif FORM == "fp8":
        scale = tl.load(tokens_of(scales, new_scales, slot, u, 1, APART), mask=there, other=0.0).to(tl.float32)
        return float_planes(words, D, EXACT), scale * 256
    else:
        GROUPS: tl.constexpr = groups_of(D)
        ROOM: tl.constexpr = PADDED // group_words(D, FORM)
        at, g = tokens_of(in_pairs(scales), in_pairs(new_scales), slot, u, GROUPS, APART), numbered(ROOM, ACROSS)
        pairs = tl.load(at + g, mask=within(there, g, GROUPS, ROOM), other=0)
        scale = (pairs & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        offset = repeated((pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True), max(1, 16 // ROOM), ACROSS)
        if EXACT:
            scale, offset = scale.to(tl.float32), offset.to(tl.float32)
        bits = tokens_of(high, new_high, slot, u, high_bytes(D, FORM), APART)
        return planes_of(words, repeated(scale, group_words(D, FORM), ACROSS), bits, there, D, FORM, ACROSS), offset


@triton.jit
def with_offsets(mix, less, M: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr):
    """mix [M, columns] and what the offsets add to each group, less [M, OFFSETS]: every group's as often as fits."""
    G: tl.constexpr = padded_words(D, FORM) // group_words(D, FORM)
    TIMES: tl.constexpr = max(1, 16 // G)
    less = tl.sum(tl.reshape(less, [M, G, TIMES]), axis=2) / TIMES
    return mix + tl.reshape(tl.broadcast_to(less[:, :, None], [M, G, GROUP]), [M, G * GROUP])


@triton.jit
def turned_back(mix, R: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr):
    G: tl.constexpr = COLUMNS // GROUP
    column = tl.arange(0, COLUMNS)[None, :]
    back = tl.reshape(turned(tl.reshape(mix, [R * G, GROUP]), R * G), [R, COLUMNS])
    return tl.where((column // GROUP + 1) * GROUP <= DV, back, mix)  # a smaller group was not turned


@triton.jit(do_not_specialize=["rows", "wanted"])  # one kernel for many numbers of rows
def _attend_codes(
    out, q, marks, k_codes, k_scales, k_high, v_codes, v_scales, v_high, sinks, parts, counters, table,
    rows, wanted, size, keep, least, scale, softcap, q_row, q_head, q_token,
    T: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, TURNED: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
    R: tl.constexpr, QUERIES: tl.constexpr, KIND: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    B: tl.constexpr, MERGES: tl.constexpr, BLOCK: tl.constexpr, BUNCH: tl.constexpr, TREE: tl.constexpr,
    CHUNK: tl.constexpr, APART: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    NUMBER: tl.constexpr = q.dtype.element_ty  # of the keys' products
    SHARE: tl.constexpr = v_codes.dtype.element_ty if VALUES == "plain" else tl.float32 if EXACT else tl.float16
    WORDS: tl.constexpr = padded_words(D, KEYS)
    V_WORDS: tl.constexpr = padded_words(DV, VALUES)
    COLUMNS: tl.constexpr = V_WORDS // group_words(DV, VALUES) * GROUP
    OFFSETS: tl.constexpr = max(16, WORDS // group_words(D, KEYS))
    V_OFFSETS: tl.constexpr = max(16, COLUMNS // GROUP)
    group = tl.program_id(0)
    head, block = group // QUERIES, group % QUERIES
    row, split, used, item, each, length, count, kept, first, many, ring = part_of(
        table, rows, wanted, size, keep, least, T, B, KIND, BLOCK
    )
    if split >= used:
        return
    pair = row * HEADS + head
    origin, pages = first_cell(table, pair, PAGE), pages_of(table, row, PAGE)
    K_WIDTH: tl.constexpr = code_bytes(D, KEYS) // max(1, word_bytes(D, KEYS))
    V_WIDTH: tl.constexpr = code_bytes(DV, VALUES) // max(1, word_bytes(DV, VALUES))
    k_store = store_of(table, K_STORE, k_codes, origin, K_WIDTH)
    v_store = store_of(table, V_STORE, v_codes, origin, V_WIDTH)
    ks_store = store_of(table, K_SCALES, k_scales, origin, scale_numbers(D, KEYS))
    vs_store = store_of(table, V_SCALES, v_scales, origin, scale_numbers(DV, VALUES))
    kh_store = store_of(table, K_HIGH, k_high, origin, high_bytes(D, KEYS))
    vh_store = store_of(table, V_HIGH, v_high, origin, high_bytes(DV, VALUES))
    k_codes += pair * T * K_WIDTH
    v_codes += pair * T * V_WIDTH
    k_scales += pair * T * scale_numbers(D, KEYS)
    v_scales += pair * T * scale_numbers(DV, VALUES)
    k_high += pair * T * high_bytes(D, KEYS)
    v_high += pair * T * high_bytes(DV, VALUES)
    begins = split * each
    stop = tl.where(split == used - 1, many + count, tl.minimum(begins + each, many))
    held = tl.minimum(stop, many) if APART else stop  # tokens in slots
    begin(PDL)

    inner = tl.arange(0, M)  # this program's queries: token t of the head's query head r // T
    r = block * M + inner
    t, g = r % T, r // T
    real = r < G * T
    low = first_seen(length + t, size, KIND)  # [M]
    at = row * q_row + (head * G + g) * q_head + t * q_token
    queries, mix = (), ()
    w = tl.arange(0, WORDS)[None, :]
    for p in tl.static_range(planes_in(D, KEYS)):
        number, is_one = number_at(column_in(w, p, D, KEYS), D, KEYS)
        plane = tl.load(q + at[:, None] + number, mask=real[:, None] & is_one, other=0.0)
        if weight_of(p, KEYS) != 1:
            plane = (plane * (1 / weight_of(p, KEYS))).to(NUMBER)
        queries = and_one(queries, tl.trans(plane))
    for _ in tl.static_range(planes_in(DV, VALUES)):
        mix = and_one(mix, tl.zeros([V_WORDS, M], tl.float32))
    factor, beside = tl.full([M], 1.0, tl.float32), tl.zeros([M], tl.float32)
    sums = tl.zeros([OFFSETS, M], NUMBER)
    if KEYS != "plain":
        mine = marks + ((row * T + t) * (HEADS * G) + head * G + g) * (2 + groups_of(D))
        factor, beside = tl.load(mine, mask=real, other=0.0), tl.load(mine + 1, mask=real, other=0.0)
        e = tl.arange(0, OFFSETS)[None, :]
        TIMES: tl.constexpr = OFFSETS // (WORDS // group_words(D, KEYS))  # one of each group's offsets counts
        is_sum = real[:, None] & (e % TIMES == 0) & (e // TIMES < groups_of(D))
        sums = tl.trans(tl.load(mine[:, None] + 2 + e // TIMES, mask=is_sum, other=0.0).to(NUMBER))
    if not SOFTCAP:
        factor, beside = factor * (scale * LOG2E), beside * (scale * LOG2E)
    top, total = tl.full([M], NOTHING, tl.float32), tl.zeros([M], tl.float32)
    less = tl.zeros([V_OFFSETS, M], tl.float32)
    last = length  # the slot of the first new token; of several, only a line has slots before they are accepted
    if T == 1:
        last = slot_at(table, length).to(tl.int32)

    for start in range(begins, stop, BLOCK):
        j = start + tl.arange(0, BLOCK)
        u = j - many  # a new token's number
        slot = j
        if KIND != "full":
            slot = tl.where(u < 0, slot_of(j, kept, first, ring, keep, KIND), last + u)
        slot = cells_in(pages, head, slot, start, held, HEADS, PAGE, KIND, BLOCK)
        there = (j < stop)[:, None]
        keys, beside_keys = read(
            k_store, ks_store, kh_store, k_codes, k_scales, k_high, slot[:, None], u[:, None], there,
            D, KEYS, EXACT, APART, False,
        )  # fmt: skip
        values, beside_values = read(
            v_store, vs_store, vh_store, v_codes, v_scales, v_high, slot[None, :], u[None, :], (j < stop)[None, :],
            DV, VALUES, EXACT, APART, True,
        )  # fmt: skip
        products = tl.zeros([BLOCK, M], tl.float32)
        if offsets(KEYS):
            products = tl.dot(beside_keys, sums, input_precision="ieee")
        for p in tl.static_range(planes_in(D, KEYS)):
            products = tl.dot(keys[p], queries[p], products, input_precision="ieee")
        if KEYS == "fp8":
            products = products * beside_keys
        scores = products * factor[None, :] + beside[None, :]
        if SOFTCAP:
            scores = scored(scores, scale, softcap, SOFTCAP)
        seen = there
        if T > 1:
            seen = seen & (u[:, None] <= t[None, :])
            if KIND != "full":
                position = tl.where(u < 0, position_of(j, kept, first), length + u)[:, None]
                seen = seen & ((position >= low[None, :]) | (position < keep))
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=0))
        shares, fade = tl.exp2(scores - higher[None, :]), tl.exp2(top - higher)
        total = total * fade + tl.sum(shares, axis=0)
        top = higher
        if VALUES == "fp8":
            shares = shares * tl.trans(beside_values)
        shares = shares.to(SHARE)
        more = ()
        for p in tl.static_range(planes_in(DV, VALUES)):
            more = and_one(more, tl.dot(values[p], shares, mix[p] * fade[None, :], input_precision="ieee"))
        mix = more
        if offsets(VALUES):
            less = tl.dot(beside_values, shares, less * fade[None, :], input_precision="ieee")

    planes = ()
    for p in tl.static_range(planes_in(DV, VALUES)):
        planes = and_one(planes, tl.trans(mix[p] * (1 / weight_of(p, VALUES))))
    mixed = in_columns(planes, M, DV, VALUES)
    if offsets(VALUES):
        mixed = with_offsets(mixed, tl.trans(less), M, DV, VALUES)
    column = tl.arange(0, COLUMNS)
    d, is_one = number_at(column, DV, VALUES)
    d = tl.where(is_one, d, DV)  # past the last: not written
    if used == 1:
        back = mixed
        if TURNED:
            back = turned_back(mixed, M, DV, COLUMNS)
        write(out, top, total, back, sinks, out, 0, row, head, r, d, count, T, G, HEADS, DV, SINKS, False)
    elif MERGES:
        n = tl.arange(0, R)
        whole, best, every, merged = gathered(
            parts, counters, top, total, mixed, group, item, split, used, inner, n, column,
            ROWS, COLUMNS, R, COLUMNS, BUNCH, TREE, CHUNK,
        )  # fmt: skip
        if whole:
            if TURNED:
                merged = turned_back(merged, R, DV, COLUMNS)
            write(out, best, every, merged, sinks, out, 0, row, head, block * M + n, d, count,
                  T, G, HEADS, DV, SINKS, False)  # fmt: skip


def decode_codes(
    coded: Coded,
    table: Tensor,  # the row of the cache's table for this entry
    window: Window,
    dtype: torch.dtype,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    most_parts: int | None = None,
    shape: Shape | None = None,
    least: int | None = None,
    page: int = 0,  # slots of a page, where the store is in pages
) -> Tensor:
    """`attend.decode_attention` over codes: [B, Hq, T, Dv] in `dtype`, from what `codes.encode` made of a pass.

    `most_parts`, `shape` and `least` are for measuring other configurations.
    """
    q, keys, values = coded.q, coded.keys, coded.values
    B, Hq, T, D = q.shape
    Hk, Dv = coded.k.codes.shape[1], values.dim
    if not 1 <= T <= NEW.value:
        raise InputError(
            f"{T} new tokens a row: decode attention takes 1 to {NEW.value}, use lamina.attention for more"
        )
    queries = Hq // Hk * T
    bits = 32 if q.dtype == torch.float32 else 16
    M = min(max(8, triton.next_power_of_2(queries)), MOST_QUERIES[bits])
    blocks = triton.cdiv(queries, M)
    rows = M if blocks > 1 else queries
    columns = padded_words(Dv, values.form) // group_words(Dv, values.form) * GROUP.value
    limits = limits_of(q.device)
    own, waves = plan_for(bits, max(columns, D), M, (keys.form, values.form), B * Hk * blocks, limits)
    shape = shape or own
    least = least or LEAST
    kind, size, keep = rule_of(window)
    most = most_parts or parts_for(B, Hk * blocks, reach(window), least, limits.multiprocessors, waves=waves)
    out = torch.empty(B, T, Hq, Dv, dtype=dtype, device=q.device)
    cuts = Division.of(B, Hk * blocks, rows, columns, most, out)
    R = triton.next_power_of_2(rows)
    launch(
        _attend_codes, (Hk * blocks, cuts.items),
        out, q, coded.marks, *words(coded.k, keys), *words(coded.v, values), out if sinks is None else sinks,
        cuts.parts, arrivals(q.device), table, B, cuts.wanted, size, keep, least, scale,
        1.0 if softcap is None else softcap, *q.stride()[:3],
        T=T, G=Hq // Hk, HEADS=Hk, D=D, DV=Dv, KEYS=keys.form, VALUES=values.form, TURNED=values.turned,
        M=M, ROWS=rows, R=R, QUERIES=blocks, KIND=kind, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        BLOCK=shape.block, **cuts.constants(R, columns, shape.warps),
        APART=not coded.stored, PAGE=page, num_warps=shape.warps,
        num_stages=stages_for(shape.stages, page),
    )  # fmt: skip
    return out.transpose(1, 2)


def words(parts: Parts, side: Side) -> tuple[Tensor, Tensor, Tensor]:
    codes = parts.codes.view(torch.uint16) if word_bytes(side.dim, side.form) == 2 else parts.codes
    return codes, parts.scales, parts.high


def plan_for(
    bits: int, columns: int, queries: int, forms: tuple[FormatName, FormatName], groups: int, limits: Limits
) -> tuple[Shape, int]:
    """The shape of a launch, and how many programs it has for each multiprocessor."""
    found = next((SHAPES[key] for key in sorted(SHAPES) if key[0] == bits and columns <= key[1]), None)
    if found is None:
        raise InputError(
            f"heads of {columns} values in codes; the attention kernels take keys and values of up to {MOST_CODED}"
        )
    if groups < limits.multiprocessors and bits == 16 and queries <= 16 and columns <= 128 and forms in FEW:
        return FEW[forms], WAVES_OF_FEW
    fp8 = forms == ("fp8", "fp8")
    waves = WAVES_OF_FP8 if fp8 else WAVES_OF_FEW if 4 * groups <= limits.multiprocessors else WAVES
    if bits == 32:
        return found, waves
    return Shape(min(found.block, FP8_BLOCK) if fp8 else found.block, max(1, queries // 16), found.stages), waves
