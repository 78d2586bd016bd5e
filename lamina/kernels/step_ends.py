"""The two ends of a captured step: reading positions from the clock; choosing the next token and committing.

These kernels find the cache through its header (`columns.HEADER`), so one captured step serves every cache.

`finish` chooses the next token and does the device's part of commit in one kernel. Each program scans a stretch of a
row's scores, with noise added where tokens are sampled, and copies its logits to the cache. The last program of a row
to arrive picks the best of all stretches, records the token that was fed, advances the row's clock, and decides whether
the row continues: it stops after an end token, or when it may generate no more tokens. `commit_tokens` is commit alone,
of any number of tokens per row, where the tokens were chosen elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.columns import HEADER
from lamina.kernels.launch import begin, launch
from lamina.kernels.noise import gumbel, uniform
from lamina.kernels.workspace import sums

LENGTHS, WRITTEN, BASE = (tl.constexpr(HEADER.index(name)) for name in ("lengths", "written", "base"))
SLACK = tl.constexpr(HEADER.index("slack"))
RECORD, RECORD_WIDTH = tl.constexpr(HEADER.index("record")), tl.constexpr(HEADER.index("record_width"))
LOGITS = tl.constexpr(HEADER.index("logits"))
STRETCH = 4096  # logits that one program scans


@triton.jit
def int64_pointer(header, COLUMN: tl.constexpr):
    """The pointer in a column of the header, to int64 values."""
    return tl.load(header + COLUMN).to(tl.pointer_type(tl.int64))


@triton.jit
def store_base(base, after, header, LOGS: tl.constexpr):
    """Stores the position of a row's recurrent base state (`Step.base_after`): the new length, or with LOGS `slack`
    tokens behind that if the log of inputs would overflow, and otherwise as before."""
    if LOGS:
        before, slack = tl.load(base), tl.load(header + SLACK)
        tl.store(base, tl.where(after - before > 2 * slack, after - slack, before))
    else:
        tl.store(base, after)


# -- the beginning ---------------------------------------------------------------------------------------------------


@triton.jit
def _positions(
    header, out, squares, used, last,  # the cache's header, int64 [B, T], int64 [used]; the largest position
    T: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i): sets 1024 of the squares to zero. Every program writes all positions, the same values."""
    begin(PDL)
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(squares + at, tl.zeros([1024], tl.int64), mask=at < used)
    n = tl.arange(0, BLOCK)
    lengths = int64_pointer(header, LENGTHS)
    at = tl.load(lengths + n // T, mask=n < TOKENS) + n % T
    tl.store(out + n, tl.minimum(at, last), mask=n < TOKENS)


def positions(header: Tensor, out: Tensor, most: int | None = None) -> None:
    """Writes the positions of each row's next T tokens to out [B, T], and sets the norms' sums of squares to zero.

    most   positions that the model has, None if not limited: a full row that has ended stays at the last of them
    """
    tokens, squares, last = out.numel(), sums(out.device).begin(), (1 << 31 if most is None else most) - 1
    launch(
        _positions, (max(1, triton.cdiv(squares.numel(), 1024)),),
        header, out, squares, squares.numel(), last, out.shape[1], tokens, triton.next_power_of_2(tokens),
        num_warps=4,
    )  # fmt: skip


# -- the end, with a choice ------------------------------------------------------------------------------------------


@triton.jit
def _finish(
    logits, scores, seed, numbers, header,  # [B, V] twice, int64 [1], int64 [B]: rows as the noise counts them
    ids, counts, left, ends,  # int64 [B, 1], [B], [B], [E]: see `finish`
    best, where, arrived,  # float32 [B, PARTS], int32 [B, PARTS], int32 [B]: see `scratch_for`
    VOCAB, ENDS, SAMPLE: tl.constexpr, ROW_ENDS: tl.constexpr,  # ROW_ENDS: ENDS, padded
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, LOGS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): BLOCK scores of one row; the last program of a row commits."""
    begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    count = tl.load(counts + row)
    if count > 0:
        kept = tl.load(header + LOGITS).to(tl.pointer_type(logits.dtype.element_ty))
        tl.store(kept + row * VOCAB + at, values, mask=at < VOCAB)
    merit = tl.load(scores + row * VOCAB + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
    if SAMPLE:  # the largest of score + Gumbel noise is a sample of the softmax
        position = tl.load(int64_pointer(header, LENGTHS) + row) + 1  # of the token to be sampled
        merit += gumbel(uniform(tl.load(seed), tl.load(numbers + row), position, 0, at))
    top = tl.max(merit, axis=0)
    tl.store(best + row * PARTS + part, top)
    tl.store(where + row * PARTS + part, tl.min(tl.where(merit == top, at, VOCAB), axis=0))
    tl.debug_barrier()  # every thread has stored before one thread counts
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrived + row, 0)
        if count > 0:
            parts = tl.arange(0, PARTS_BLOCK)
            # Other programs of this launch wrote these: read them from L2, past the L1 cache.
            tops = tl.load(best + row * PARTS + parts, mask=parts < PARTS, other=float("-inf"), cache_modifier=".cg")
            places = tl.load(where + row * PARTS + parts, mask=parts < PARTS, other=0, cache_modifier=".cg")
            chosen = tl.min(tl.where(tops == tl.max(tops, axis=0), places, VOCAB), axis=0)
            chosen = tl.minimum(chosen, VOCAB - 1)  # where every score is NaN
            fed = tl.load(ids + row)
            lengths, written = int64_pointer(header, LENGTHS), int64_pointer(header, WRITTEN)
            base, record = int64_pointer(header, BASE), int64_pointer(header, RECORD)
            length = tl.load(lengths + row)
            tl.store(record + row * tl.load(header + RECORD_WIDTH) + length, fed)
            tl.store(lengths + row, length + 1)
            tl.store(written + row, tl.maximum(tl.load(written + row), length + 1))
            store_base(base + row, length + 1, header, LOGS)
            end = tl.arange(0, ROW_ENDS)
            ended = tl.sum((tl.load(ends + end, mask=end < ENDS, other=-1) == fed).to(tl.int32), axis=0) > 0
            remaining = tl.load(left + row) - 1
            tl.store(left + row, remaining)
            tl.store(counts + row, ((remaining > 0) & (ended == 0)).to(tl.int64))
            tl.store(ids + row, chosen.to(tl.int64))


def finish(
    logits: Tensor,  # [B, V]: the cache keeps them
    scores: Tensor,  # [B, V]: the token is chosen from these: the logits, or the output of processors
    noise: tuple[Tensor, Tensor] | None,  # seed [1] and the rows' numbers [B], where tokens are sampled
    header: Tensor,
    ids: Tensor,  # [B, 1]: the tokens that were fed; overwritten by those to feed next
    counts: Tensor,  # [B]: 1 where the row takes part; set to 0 where it ends
    left: Tensor,  # [B]: how many tokens each row may still generate
    ends: Tensor,  # [E]: ids that end a row
    scratch: tuple[Tensor, Tensor, Tensor],  # of `scratch_for`
    logs: bool = False,  # whether recurrences log their inputs
) -> None:
    """Chooses the next tokens and commits the ones fed. A row with count 0 is not changed."""
    rows, vocab = logits.shape
    best, where, arrived = scratch
    seed, numbers = noise or (left, left)
    launch(
        _finish, (rows, best.shape[1]),
        logits, scores, seed, numbers, header, ids, counts, left, ends, best, where, arrived, vocab, len(ends),
        noise is not None, triton.next_power_of_2(max(len(ends), 1)), STRETCH, best.shape[1],
        triton.next_power_of_2(best.shape[1]), logs, num_warps=8,
    )  # fmt: skip


def scratch_for(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Scratch of `finish`: the best score of each stretch, its token id, and how many stretches of a row are done."""
    parts = triton.cdiv(vocab, STRETCH)
    return (
        torch.zeros(rows, parts, device=device),
        torch.zeros(rows, parts, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


# -- the end, without one --------------------------------------------------------------------------------------------


@triton.jit
def _commit_tokens(
    logits, header, ids, accepted,  # [B, T, V] or [B, V], the cache's header, int64 [B, T], int64 [B]
    each, VOCAB, T: tl.constexpr, T_BLOCK: tl.constexpr, BLOCK: tl.constexpr, LOGS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): copies BLOCK logits of one row; its part 0 also advances the row. each: tokens of a row that
    have logits, T or 1."""
    begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    count = tl.load(accepted + row)
    if count > 0:
        at = part * BLOCK + tl.arange(0, BLOCK)
        kept = tl.load(header + LOGITS).to(tl.pointer_type(logits.dtype.element_ty))
        values = tl.load(logits + (row * each + tl.minimum(count, each) - 1) * VOCAB + at, mask=at < VOCAB)
        tl.store(kept + row * VOCAB + at, values, mask=at < VOCAB)
        if part == 0:
            lengths, written = int64_pointer(header, LENGTHS), int64_pointer(header, WRITTEN)
            base, record = int64_pointer(header, BASE), int64_pointer(header, RECORD)
            before, t = tl.load(lengths + row), tl.arange(0, T_BLOCK)
            fed = tl.load(ids + row * T + t, mask=t < count, other=0)
            tl.store(record + row * tl.load(header + RECORD_WIDTH) + before + t, fed, mask=t < count)
            after = before + count
            tl.store(lengths + row, after)
            tl.store(written + row, tl.maximum(tl.load(written + row), after))
            store_base(base + row, after, header, LOGS)


def commit_tokens(logits: Tensor, header: Tensor, ids: Tensor, accepted: Tensor, logs: bool = False) -> None:
    """Commits the first accepted[b] tokens of each row of ids [B, T]: records them, keeps the logits after the last of
    them and advances the clock. A row that accepts 0 is not changed.

    logits   [B, T, V] after each token, or [B, V] after each row's last accepted one
    logs     whether recurrences log their inputs
    """
    (rows, T), vocab = ids.shape, logits.shape[-1]
    launch(
        _commit_tokens, (rows, triton.cdiv(vocab, STRETCH)),
        logits, header, ids, accepted, logits.numel() // (rows * vocab), vocab, T, triton.next_power_of_2(T), STRETCH,
        logs, num_warps=8,
    )  # fmt: skip
