"""The indexer: scores every token of a row for each query, and lists the tokens with the highest scores.

    index_scores     Σ over heads of weight · relu(q · k), for each new token and each token that it sees
    select_tokens    the positions of the highest scores, ascending; `mla.decode_latent` reads these tokens alone

Scores go to a buffer whose address and room are in the entry's table, since a captured launch must fit any number of
tokens (`lamina.runtime.captured`). It has room for a few queries of each row: those of a decode step, or some of a
prompt's, `many` from `first` on (`select_in_turns`), so no query × key matrix is as large as the prompt. Keys are
stored in a line, in the order of tokens.

A new token sees the tokens up to its own. In passes with packed segments or spans it sees what `Marks` say: the kernels
get the first and last slot that each query sees and the spans of the new tokens, and never a mask.

The reference is `lamina.attention.indexer`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.cache.codec.registry import FormatName
from lamina.kernels.entry import (
    COUNTS,
    K_HIGH,
    K_SCALES,
    SCORE_ROOM,
    SCORES,
    STORE,
    count_of,
    lengths_of,
    store_pointer,
)
from lamina.kernels.launch import begin, launch
from lamina.kernels.limits import limits_of
from lamina.kernels.quant.dequantize import dequantize
from lamina.kernels.quant.field import Coded
from lamina.kernels.quant.layout import code_bytes, high_bytes, scale_values
from lamina.kernels.slots import cells_in, first_cell, pages_of, stages_for

BLOCK = 2048  # scores that are read together in the search for the highest
QUERIES = 16  # of a program that scores: it reads its keys once for all of them
DIGIT = tl.constexpr(4)  # bits of a score that one round of the search decides
DIGITS = tl.constexpr(16)


class Marks(NamedTuple):
    """What the new tokens of a pass with packed segments or spans see, all int32 [B, T].

    first   the first slot that a token may see
    stop    one past the last slot that it may see
    spans   tokens of the same span >= 0 see each other in both directions; None: no spans
    """

    first: Tensor
    stop: Tensor
    spans: Tensor | None


NONE: tuple[None, None, None] = (None, None, None)
"""In place of `Marks`: every token sees those up to its own."""


# -- scores ----------------------------------------------------------------------------------------------------------


@triton.jit
def scores_of(table, query):
    """Pointer to the scores of a query, the row-major index of (row, which of its `many` queries)."""
    room = tl.load(table + SCORE_ROOM)
    return tl.load(table + SCORES).to(tl.pointer_type(tl.float32)) + query.to(tl.int64) * room


@triton.jit
def length_and_count(table, row, T):
    """-> committed tokens of the row, and how many of its T new ones are real. T need not be a constant"""
    return tl.load(lengths_of(table) + row).to(tl.int32), count_of(tl.load(table + COUNTS), row, T)


@triton.jit
def sees_slot(slot, own, firsts, stops, spans, place, row, T):
    """Which slots the query in slot `own` sees, by its `Marks`; place: its index row · T + t."""
    seen = slot <= own
    if spans is not None:
        t = slot - own + place - row * T  # the index of a new token; negative for earlier ones
        other = tl.load(spans + row * T + t, mask=(t >= 0) & (t < T), other=-1)
        seen = seen | (other == tl.load(spans + place))  # a query without a span stops at its own slot
    return seen & (slot >= tl.load(firsts + place)) & (slot < tl.load(stops + place))


@triton.jit(do_not_specialize=["T", "first", "many"])  # one kernel for many numbers of tokens
def _index_scores(
    q, weights, table,  # [B, H, T, D], [B, T, H] float32; the entry's table row
    firsts, stops, spans,  # [B, T] of `Marks`; None without
    store, scales, high,  # tensors with the types of the stored parts
    T, first, many,  # new tokens of a row; of which queries first … first + many - 1 are scored
    q_row, q_head, q_token,  # strides
    QUERIES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,  # heads and tokens of one product
    FORM: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, split, i): the scores of one split of the tokens that the i-th QUERIES queries of a row see, new
    ones included; -inf where Marks hide a token from one of these queries."""
    WIDTH: tl.constexpr = code_bytes(D, FORM)  # values per slot, or bytes of codes
    row, split = tl.program_id(0), tl.program_id(1)
    length, count = length_and_count(table, row, T)
    own = tl.program_id(2) * QUERIES
    stop = tl.minimum(first + many, count)
    n = tl.where(first + own < stop, length + tl.minimum(first + own + QUERIES, stop), 0)
    low = 0
    if firsts is not None:
        low, n = 1 << 30, 0
        for i in range(QUERIES):
            there, place = first + own + i < stop, row * T + first + own + i
            low = tl.minimum(low, tl.load(firsts + place, mask=there, other=1 << 30))
            n = tl.maximum(n, tl.load(stops + place, mask=there, other=0))
        low = tl.minimum(low, n)
    size = tl.cdiv(tl.cdiv(n - low, tl.num_programs(1)), BLOCK) * BLOCK
    begins = low + split * size
    ends = tl.minimum(begins + size, n)
    if begins >= ends:
        return
    origin, pages = first_cell(table, row, PAGE), pages_of(table, row, PAGE)
    keys_at = store_pointer(table, STORE, store.dtype) + origin * WIDTH
    if FORM != "plain":
        scales = tl.multiple_of(tl.load(table + K_SCALES), 4).to(scales.dtype) + origin * scale_values(D, FORM)
        high = tl.load(table + K_HIGH).to(high.dtype) + origin * high_bytes(D, FORM)
    begin(PDL)

    d, h = tl.arange(0, D_PAD)[None, :], tl.arange(0, HEADS)
    for start in range(begins, ends, BLOCK):
        j = start + tl.arange(0, BLOCK)
        there = (j < ends)[:, None]
        cell = cells_in(pages, 0, j, start, ends, 1, PAGE, "full", BLOCK)[:, None]
        if FORM == "plain":
            keys = tl.load(keys_at + cell * WIDTH + d, mask=there & (d < D), other=0.0)  # [BLOCK, D]
        else:
            by, above = scales + cell * scale_values(D, FORM), high + cell * high_bytes(D, FORM)
            keys = dequantize(keys_at + cell * WIDTH, by, above, there, 0, D, D_PAD, D, FORM).to(q.dtype.element_ty)
        for i in range(QUERIES):
            t = first + own + i
            score = tl.zeros([BLOCK], tl.float32)
            for start_head in range(0, H, HEADS):
                head = start_head + h
                inside = (head < H) & (t < stop)
                at = q + row.to(tl.int64) * q_row + t * q_token + head * q_head
                queries = tl.load(at[:, None] + d, mask=inside[:, None] & (d < D), other=0.0)  # [HEADS, D]
                weight = tl.load(weights + (row * T + t) * H + head, mask=inside, other=0.0)
                products = tl.dot(keys, tl.trans(queries), input_precision="ieee")  # [BLOCK, HEADS]
                score += tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1)
            if firsts is not None:
                seen = sees_slot(j, length + t, firsts, stops, spans, row * T + tl.minimum(t, stop - 1), row, T)
                score = tl.where(seen, score, float("-inf"))
            tl.store(scores_of(table, row * many + own + i) + j, score, mask=(j < ends) & (t < stop))


def index_scores(
    q: Tensor,  # [B, H, T, D]: rotated, as the stored keys are
    weights: Tensor,  # [B, T, H] float32
    new: Tensor | Coded,  # this pass's keys, in their slots by now: only its types are used
    table: Tensor,  # the row of the cache's table for this entry
    *,
    page: int = 0,  # slots per page; 0 without pages
    first: int = 0,
    many: int | None = None,  # queries from `first` on; None: all
    marks: Marks | None = None,
) -> None:
    """Writes the scores of all tokens of each row, for these queries, to the buffer that the table names, in which a
    row has `many` lines."""
    B, H, T, D = q.shape
    many = T if many is None else many
    queries = many if many <= QUERIES else QUERIES
    groups = triton.cdiv(many, queries)
    form: FormatName = "plain"
    if isinstance(new, Coded):
        form, store, scales, high = new.keys.form, new.k.codes, new.k.scales, new.k.high
    else:
        store = scales = high = new
    most, block = (64, 64) if q.element_size() == 2 else (16, 32)
    heads = min(max(16, triton.next_power_of_2(H)), most)
    launch(
        _index_scores, (B, max(1, limits_of(q.device).multiprocessors // (B * groups)), groups),
        q, weights.contiguous(), table, *(marks or NONE), store, scales, high, T, first, many, *q.stride()[:3],
        QUERIES=queries, H=H, D=D, D_PAD=max(16, triton.next_power_of_2(D)), HEADS=heads, BLOCK=block, FORM=form,
        PAGE=page, num_warps=4 if q.element_size() == 2 else 8, num_stages=stages_for(2, page),
    )  # fmt: skip


# -- the highest -----------------------------------------------------------------------------------------------------


@triton.jit
def ordered_bits(score):
    """float32 -> uint32 in the same order; 0.0 and -0.0 are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def least_selected(scores, begins, ends, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """-> (the bits of the TOP-th highest of the scores begins … ends - 1, how many scores with these bits are selected)

    It is found four bits at a time, from the highest bits on: each round counts the scores that agree with the bits
    found so far, by their next digit.
    """
    i, digit = tl.arange(0, BLOCK), tl.arange(0, DIGITS)
    least = tl.zeros([], tl.uint32)
    wanted = tl.zeros([], tl.int32) + TOP  # how many of the scores that agree with the bits found are selected
    shift = tl.full([], 32, tl.uint32)
    for _ in range(32 // DIGIT):
        shift -= DIGIT
        found = tl.zeros([DIGITS], tl.int32)
        for start in range(begins, ends, BLOCK):
            bits = ordered_bits(tl.load(scores + start + i, mask=start + i < ends, other=0.0)) ^ least
            value = tl.where(start + i < ends, bits >> shift, DIGITS)  # below DIGITS where all higher bits agree
            found += tl.sum((value[:, None] == digit[None, :]).to(tl.int32), axis=0)
        from_here = tl.sum(found) - tl.cumsum(found, 0) + found  # scores with this digit or a higher one
        best = tl.sum((from_here >= wanted).to(tl.int32)) - 1
        wanted -= tl.sum(tl.where(digit > best, found, 0))
        least |= best.to(tl.uint32) << shift
    return least, wanted


@triton.jit(do_not_specialize=["T", "first", "many"])
def _select_tokens(
    chosen, table,  # int32 [B, T, TOP]; the entry's table row
    firsts, stops,  # [B, T] of `Marks`; None without
    T, first, many,  # new tokens of a row; of which queries first … first + many - 1 are scored
    TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row · many + i), query t = first + i: lists the TOP tokens with the highest scores in order, of equal
    ones the first; all if fewer. With Marks, tokens with the score -inf are not listed, and the list is filled with -1.
    """
    query = tl.program_id(0)
    row, t = query // many, first + query % many
    length, count = length_and_count(table, row, T)
    begins, ends = 0, tl.where(t < count, length + t + 1, 0)
    if firsts is not None:
        begins = tl.load(firsts + row * T + t)
        ends = tl.where(t < count, tl.load(stops + row * T + t), begins)
    chosen += (row.to(tl.int64) * T + t) * TOP
    i = tl.arange(0, BLOCK)
    if firsts is None:  # noqa: SIM102 (decided when the kernel is built)
        if ends <= TOP:
            begin(PDL)
            for start in range(0, ends, BLOCK):
                tl.store(chosen + start + i, start + i, mask=start + i < ends)
            return
    scores = scores_of(table, query)
    begin(PDL)
    least, wanted = tl.zeros([], tl.uint32), tl.zeros([], tl.int32)  # below every score: all are listed
    if ends - begins > TOP:
        least, wanted = least_selected(scores, begins, ends, TOP, BLOCK)
    listed, equals = 0, 0
    for start in range(begins, ends, BLOCK):
        j = start + i
        score = tl.load(scores + j, mask=j < ends, other=0.0)
        bits, there = ordered_bits(score), j < ends
        if firsts is not None:
            there = there & (score > float("-inf"))
        equal = ((bits == least) & there).to(tl.int32)
        takes = ((bits > least) & there) | ((equal == 1) & (equals + tl.cumsum(equal, 0) <= wanted))
        place = listed + tl.cumsum(takes.to(tl.int32), 0) - 1
        tl.store(chosen + place, j, mask=takes)
        listed += tl.sum(takes.to(tl.int32))
        equals += tl.sum(equal)
    if firsts is not None:
        for start in range(listed, TOP, BLOCK):
            tl.store(chosen + start + i, -1, mask=start + i < TOP)


def select_tokens(
    rows: int, tokens: int, top: int, table: Tensor, *, block: int = BLOCK, first: int = 0, many: int | None = None,
    into: Tensor | None = None, marks: Marks | None = None,
) -> Tensor:  # fmt: skip
    """The slots of the `top` tokens with the highest scores for each new token, ascending -> int32 [B, T, top]

    A token that sees n < top tokens has n slots; the rest is undefined, or -1 with `marks`. `block` is for measuring
    other configurations.

    first, many   of these queries alone, whose scores are in the buffer
    into          the tensor that is written; None: a new one
    """
    many = tokens if many is None else many
    if into is None:
        into = torch.empty(rows, tokens, top, dtype=torch.int32, device=table.device)
    launch(
        _select_tokens, (rows * many,),
        into, table, *(marks or NONE)[:2], tokens, first, many, TOP=top, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return into


def select_in_turns(
    q: Tensor, weights: Tensor, new: Tensor | Coded, table: Tensor, top: int, most: int, page: int = 0,
    marks: Marks | None = None,
) -> Tensor:  # fmt: skip
    """`index_scores` and `select_tokens` for up to `most` queries of each row after the other, for which the buffer has
    room -> int32 [B, T, top]"""
    B, _, T, _ = q.shape
    chosen = torch.empty(B, T, top, dtype=torch.int32, device=q.device)
    for first in range(0, T, most):
        some: dict[str, Any] = dict(first=first, many=min(most, T - first), marks=marks)
        index_scores(q, weights, new, table, page=page, **some)
        select_tokens(B, T, top, table, **some, into=chosen)
    return chosen
