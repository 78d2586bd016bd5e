"""Decode attention over codes: each code is read once, and dequantized in the registers that enter the product.

Splits, windows and merging are those of `decode.py`. A program is one warp per 16 queries: blocks are short, many
programs share an SM, and warps exchange nothing. Keys and values are never assembled: they stay in planes (see
`quant/layout.py`). New tokens follow the visible ones in the same list, in their slots or (APART) in tensors of this
pass (see `quant/encode.py`), so one loop reads all.

Matrix units take at least 16 rows and 8 columns. Tokens are the rows of the scores, and of the transposed values; the
few queries of a key head are the columns. The other way round, twice as much of each product would be padding.

Everything is computed on codes. With q prepared by `quant/encode.py` as q̂ = rotated q / largest,

    q·k = q·mean + largest · Σ over groups (scale · q̂·codes + offset · Σ q̂)

and an output over Hadamard-rotated values is rotated back once, by the program that stores it.

The reference is `lamina.attention.reference_attention` over what the codec's `decode` gives.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.attention.bias import KernelForm
from lamina.attention.window import Window
from lamina.cache.codec.registry import FormatName
from lamina.errors import InputError
from lamina.kernels.attention.online_softmax import LOG2E, LOWEST, merge_splits, store_output, to_scores
from lamina.kernels.attention.quantized_load import add_offsets, load_tokens, rotate_back, store_of
from lamina.kernels.attention.rope_append import slot_at
from lamina.kernels.attention.score_bias import add_bias, bias_arguments, slopes_of
from lamina.kernels.attention.split_kv import Division, assigned_split, target_splits
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.attention.visible import (
    MOST_NEW,
    first_seen,
    most_visible,
    position_of,
    slot_of,
    window_arguments,
)
from lamina.kernels.eligibility import MOST_CODED
from lamina.kernels.entry import K_HIGH, K_SCALES, K_STORE, V_HIGH, V_SCALES, V_STORE
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import Limits, limits_of
from lamina.kernels.quant.dequantize import appended
from lamina.kernels.quant.field import Coded, Parts, Side
from lamina.kernels.quant.layout import (
    GROUP,
    code_bytes,
    column_of,
    group_words,
    groups_of,
    high_bytes,
    offsets,
    padded_words,
    plane_factor,
    planes_in,
    planes_to_columns,
    scale_values,
    value_at,
    word_bytes,
)
from lamina.kernels.slots import cells_in, first_cell, pages_of, stages_for
from lamina.kernels.workspace import arrivals

# By bits per value of the computation, and by columns of a value head.
SHAPES = {
    (16, 64): Tiling(32, 1, 3),
    (16, 128): Tiling(32, 1, 3),
    (16, 256): Tiling(16, 1, 3),
    (32, 256): Tiling(16, 4, 2),
}
FP8_BLOCK = 16  # tokens per block, at most
# By the formats of keys and values, where the heads of all rows leave SMs free: the time of one split counts then, and
# how many there are to merge.
FEW = {(8, 8): Tiling(64, 4, 3), ("fp8", "fp8"): Tiling(64, 4, 3), (8, 4): Tiling(64, 2, 3)}
MOST_QUERIES = {16: 64, 32: 16}  # per program, by bits per value
LEAST = 128  # tokens per split, at least
WAVES, WAVES_OF_FEW, WAVES_OF_FP8 = 8, 4, 16  # programs per SM


@triton.jit(do_not_specialize=["rows", "wanted"])  # one kernel for many numbers of rows
def _attend_codes(
    out, q, query_terms,  # [B, T, Hq, DV], [B, Hq, T, D], [B, T, Hq, 2 + groups]
    k_codes, k_scales, k_high, v_codes, v_scales, v_high,  # this pass's parts, [B, Hk, T, width] each
    sinks, bias, buckets, farthest,  # [Hq]; `score_bias.py`
    parts, counters, table,  # partial results and their counters (`merge_splits`); the entry's table row
    rows, wanted, size, keep, least,  # B; target number of splits; the window; shortest split
    scale, softcap,
    q_row, q_head, q_token,  # strides
    T: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr,  # G = Hq // Hk, HEADS = Hk
    D: tl.constexpr, DV: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, HADAMARD: tl.constexpr,  # formats; whether values are rotated
    M: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,  # queries per program: padded, stored, stored and padded
    QUERIES: tl.constexpr, KIND: tl.constexpr,  # blocks of M queries per key head; kind of window
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BIAS: tl.constexpr, NEW: tl.constexpr,  # NEW: there are new keys
    B: tl.constexpr, MERGES: tl.constexpr, BLOCK: tl.constexpr, BUNCH: tl.constexpr, TREE: tl.constexpr,
    CHUNK: tl.constexpr, APART: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,  # APART: new tokens not in slots
):  # fmt: skip
    """Program (head · QUERIES + block, item): M queries of one key head over one split of one row."""
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    K_DTYPE: tl.constexpr = q.dtype.element_ty  # of the products with keys
    V_DTYPE: tl.constexpr = v_codes.dtype.element_ty if VALUES == "plain" else tl.float32 if EXACT else tl.float16
    WORDS: tl.constexpr = padded_words(D, KEYS)
    V_WORDS: tl.constexpr = padded_words(DV, VALUES)
    COLUMNS: tl.constexpr = V_WORDS // group_words(DV, VALUES) * GROUP
    OFFSETS: tl.constexpr = max(16, WORDS // group_words(D, KEYS))
    V_OFFSETS: tl.constexpr = max(16, COLUMNS // GROUP)
    group = tl.program_id(0)
    head, block = group // QUERIES, group % QUERIES
    row, split, n_splits, base, split_tokens, length, count, kept, first, n_visible, ring = assigned_split(
        table, rows, wanted, size, keep, least, T, B, KIND, BLOCK
    )
    if split >= n_splits:
        return
    row_head = row * HEADS + head
    origin, pages = first_cell(table, row_head, PAGE), pages_of(table, row, PAGE)
    K_WIDTH: tl.constexpr = code_bytes(D, KEYS) // max(1, word_bytes(D, KEYS))  # words per cell
    V_WIDTH: tl.constexpr = code_bytes(DV, VALUES) // max(1, word_bytes(DV, VALUES))
    k_store = store_of(table, K_STORE, k_codes, origin, K_WIDTH)
    v_store = store_of(table, V_STORE, v_codes, origin, V_WIDTH)
    ks_store = store_of(table, K_SCALES, k_scales, origin, scale_values(D, KEYS))
    vs_store = store_of(table, V_SCALES, v_scales, origin, scale_values(DV, VALUES))
    kh_store = store_of(table, K_HIGH, k_high, origin, high_bytes(D, KEYS))
    vh_store = store_of(table, V_HIGH, v_high, origin, high_bytes(DV, VALUES))
    k_codes += row_head * T * K_WIDTH
    v_codes += row_head * T * V_WIDTH
    k_scales += row_head * T * scale_values(D, KEYS)
    v_scales += row_head * T * scale_values(DV, VALUES)
    k_high += row_head * T * high_bytes(D, KEYS)
    v_high += row_head * T * high_bytes(DV, VALUES)
    begins = split * split_tokens
    stop = tl.minimum(begins + split_tokens, n_visible)
    if NEW:
        stop = tl.where(split == n_splits - 1, n_visible + count, stop)
    in_slots = tl.minimum(stop, n_visible) if APART else stop  # tokens before this one have slots
    begin(PDL)

    inner = tl.arange(0, M)  # this program's queries: r = g · T + t is token t of query head head · G + g
    r = block * M + inner
    t, g = r % T, r // T
    real = r < G * T
    low = first_seen(length + t, size, KIND)  # [M]
    h = (head * G + g)[None, :]
    slopes = slopes_of(bias, h, real[None, :], BIAS)
    at = row * q_row + (head * G + g) * q_head + t * q_token
    queries, mix = (), ()  # one matrix per plane: [WORDS, M] of the keys, [V_WORDS, M] of the values
    w = tl.arange(0, WORDS)[None, :]
    for p in tl.static_range(planes_in(D, KEYS)):
        index, exists = value_at(column_of(w, p, D, KEYS), D, KEYS)
        plane = tl.load(q + at[:, None] + index, mask=real[:, None] & exists, other=0.0)
        if plane_factor(p, KEYS) != 1:
            plane = (plane * (1 / plane_factor(p, KEYS))).to(K_DTYPE)
        queries = appended(queries, tl.trans(plane))
    for _ in tl.static_range(planes_in(DV, VALUES)):
        mix = appended(mix, tl.zeros([V_WORDS, M], tl.float32))
    factor, added = tl.full([M], 1.0, tl.float32), tl.zeros([M], tl.float32)  # score = product · factor + added
    sums = tl.zeros([OFFSETS, M], K_DTYPE)
    if KEYS != "plain":
        mine = query_terms + ((row * T + t) * (HEADS * G) + head * G + g) * (2 + groups_of(D))
        factor, added = tl.load(mine, mask=real, other=0.0), tl.load(mine + 1, mask=real, other=0.0)
        e = tl.arange(0, OFFSETS)[None, :]
        TIMES: tl.constexpr = OFFSETS // (WORDS // group_words(D, KEYS))  # entries per group, of which the first counts
        is_sum = real[:, None] & (e % TIMES == 0) & (e // TIMES < groups_of(D))
        sums = tl.trans(tl.load(mine[:, None] + 2 + e // TIMES, mask=is_sum, other=0.0).to(K_DTYPE))
    if not SOFTCAP:
        factor, added = factor * (scale * LOG2E), added * (scale * LOG2E)
    top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
    mix_offsets = tl.zeros([V_OFFSETS, M], tl.float32)  # what the offsets of the values add to each group
    # The slot of the first new token. Several new tokens have slots before they are accepted only in a line.
    last = length
    if T == 1:
        last = slot_at(table, length).to(tl.int32)

    for start in range(begins, stop, BLOCK):
        j = start + tl.arange(0, BLOCK)
        u = j - n_visible  # index of a new token; negative for committed ones
        slot = j
        if KIND != "full":
            slot = tl.where(u < 0, slot_of(j, kept, first, ring, keep, KIND), last + u)
        cell = cells_in(pages, head, slot, start, in_slots, HEADS, PAGE, KIND, BLOCK)
        there = (j < stop)[:, None]
        # Planes of codes; extra: the offsets of groups, or the scales of fp8.
        keys, k_extra = load_tokens(
            k_store, ks_store, kh_store, k_codes, k_scales, k_high, cell[:, None], u[:, None], there,
            D, KEYS, EXACT, APART, False,
        )  # fmt: skip
        values, v_extra = load_tokens(
            v_store, vs_store, vh_store, v_codes, v_scales, v_high, cell[None, :], u[None, :], (j < stop)[None, :],
            DV, VALUES, EXACT, APART, True,
        )  # fmt: skip
        products = tl.zeros([BLOCK, M], tl.float32)
        if offsets(KEYS):
            products = tl.dot(k_extra, sums, input_precision="ieee")
        for p in tl.static_range(planes_in(D, KEYS)):
            products = tl.dot(keys[p], queries[p], products, input_precision="ieee")
        if KEYS == "fp8":
            products = products * k_extra
        scores = products * factor[None, :] + added[None, :]
        if SOFTCAP:
            scores = to_scores(scores, scale, softcap, SOFTCAP)
        if BIAS != "":
            p = tl.where(u < 0, position_of(j, kept, first), length + u)[:, None]
            distance = (length + t)[None, :] - p
            scores = add_bias(scores, slopes, bias, buckets, farthest, h, real[None, :], distance, HEADS * G, BIAS)
        seen = there
        if T > 1:
            seen = seen & (u[:, None] <= t[None, :])
            if KIND != "full":
                position = tl.where(u < 0, position_of(j, kept, first), length + u)[:, None]
                seen = seen & ((position >= low[None, :]) | (position < keep))
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=0))
        probs, rescale = tl.exp2(scores - higher[None, :]), tl.exp2(top - higher)
        total = total * rescale + tl.sum(probs, axis=0)
        top = higher
        if VALUES == "fp8":
            probs = probs * tl.trans(v_extra)
        probs = probs.to(V_DTYPE)
        more = ()
        for p in tl.static_range(planes_in(DV, VALUES)):
            more = appended(more, tl.dot(values[p], probs, mix[p] * rescale[None, :], input_precision="ieee"))
        mix = more
        if offsets(VALUES):
            mix_offsets = tl.dot(v_extra, probs, mix_offsets * rescale[None, :], input_precision="ieee")

    planes = ()
    for p in tl.static_range(planes_in(DV, VALUES)):
        planes = appended(planes, tl.trans(mix[p] * (1 / plane_factor(p, VALUES))))
    mixed = planes_to_columns(planes, M, DV, VALUES)
    if offsets(VALUES):
        mixed = add_offsets(mixed, tl.trans(mix_offsets), M, DV, VALUES)
    column = tl.arange(0, COLUMNS)
    d, exists = value_at(column, DV, VALUES)
    d = tl.where(exists, d, DV)  # past the last value: not stored
    if n_splits == 1:
        back = mixed
        if HADAMARD:
            back = rotate_back(mixed, M, DV, COLUMNS)
        store_output(out, top, total, back, sinks, out, 0, row, head, r, d, count, T, G, HEADS, DV, SINKS, False)
    elif MERGES:
        n = tl.arange(0, R)
        whole, best, all_sums, merged = merge_splits(
            parts, counters, top, total, mixed, group, base, split, n_splits, inner, n, column,
            ROWS, COLUMNS, R, COLUMNS, BUNCH, TREE, CHUNK,
        )  # fmt: skip
        if whole:
            if HADAMARD:
                merged = rotate_back(merged, R, DV, COLUMNS)
            store_output(out, best, all_sums, merged, sinks, out, 0, row, head, block * M + n, d, count,
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
    bias: KernelForm | None = None,
    new: bool = True,
    most_parts: int | None = None,
    shape: Tiling | None = None,
    least: int | None = None,
    page: int = 0,  # slots per page; 0 without pages
    most_new: int = MOST_NEW.value,
) -> Tensor:
    """`decode.decode_attention` over codes, from what `quant.encode.encode` gives -> [B, Hq, T, Dv] in `dtype`.

    new        False: there are no new keys and values, as in cross-attention, and `coded` has queries alone
    most_new   new tokens per row that the caller allows; with many, every block of queries reads all of them

    `most_parts` (target number of splits), `shape` and `least` are for measuring other configurations.
    """
    q, keys, values = coded.q, coded.keys, coded.values
    B, Hq, T, D = q.shape
    Hk, Dv = coded.k.codes.shape[1], values.dim
    if not 1 <= T <= most_new:
        raise InputError(f"{T} new tokens a row: decode attention takes 1 to {most_new}, use lamina.attention for more")
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
    kind, size, keep = window_arguments(window)
    most = most_parts or target_splits(B, Hk * blocks, most_visible(window), least, limits.multiprocessors, waves=waves)
    out = torch.empty(B, T, Hq, Dv, dtype=dtype, device=q.device)
    division = Division.of(B, Hk * blocks, rows, columns, most, out)
    R = triton.next_power_of_2(rows)
    biases, bias_kind = bias_arguments(bias)
    launch(
        _attend_codes, (Hk * blocks, division.items),
        out, q, coded.query_terms, *as_words(coded.k, keys), *as_words(coded.v, values),
        out if sinks is None else sinks, *biases, division.parts, arrivals(q.device), table,
        B, division.wanted, size, keep, least, scale, 1.0 if softcap is None else softcap, *q.stride()[:3],
        T=T, G=Hq // Hk, HEADS=Hk, D=D, DV=Dv, KEYS=keys.form, VALUES=values.form, HADAMARD=values.hadamard,
        M=M, ROWS=rows, R=R, QUERIES=blocks, KIND=kind, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        BIAS=bias_kind, NEW=new, BLOCK=shape.block, **division.constants(R, columns, shape.warps),
        APART=not coded.stored, PAGE=page, num_warps=shape.warps,
        num_stages=stages_for(shape.stages, page),
    )  # fmt: skip
    return out.transpose(1, 2)


def as_words(parts: Parts, side: Side) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, high bits) with the codes viewed as words."""
    codes = parts.codes.view(torch.uint16) if word_bytes(side.dim, side.form) == 2 else parts.codes
    return codes, parts.scales, parts.high


def plan_for(
    bits: int, columns: int, queries: int, forms: tuple[FormatName, FormatName], groups: int, limits: Limits
) -> tuple[Tiling, int]:
    """-> (the shape of the launch, programs per SM)."""
    found = next((SHAPES[key] for key in sorted(SHAPES) if key[0] == bits and columns <= key[1]), None)
    if found is None:
        raise InputError(
            f"quantized heads of {columns} values; the attention kernels take keys and values of up to {MOST_CODED}"
        )
    if groups < limits.multiprocessors and bits == 16 and queries <= 16 and columns <= 128 and forms in FEW:
        return FEW[forms], WAVES_OF_FEW
    fp8 = forms == ("fp8", "fp8")
    waves = WAVES_OF_FP8 if fp8 else WAVES_OF_FEW if 4 * groups <= limits.multiprocessors else WAVES
    if bits == 32:
        return found, waves
    return Tiling(min(found.block, FP8_BLOCK) if fp8 else found.block, max(1, queries // 16), found.stages), waves
