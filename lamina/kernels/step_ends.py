"""The two ends of a captured pass: reading the clock, and choosing the next token or taking in the accepted ones.

What belongs to a cache is reached through pointers in small tables on the device, so one captured step serves every
cache: `HEADER` is one row of them for the cache as a whole, beside the rows that its layers have.

`finish` is the choice of the next token and the device half of commit in one kernel. Each program looks at a stretch of
a row's scores, with noise on them where tokens are drawn, and puts its logits into the cache; the last of a row to
arrive picks the best of all stretches, records the token that was fed, advances the row's marks, and says whether the
row goes on: it stops after an end token or when nothing is left to make. `take_in` is commit alone, of any number of
tokens a row, where somebody else has chosen.
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
RECORD, RECORD_WIDTH = tl.constexpr(HEADER.index("record")), tl.constexpr(HEADER.index("record_width"))
LOGITS = tl.constexpr(HEADER.index("logits"))
STRETCH = 4096  # logits that one program looks at


@triton.jit
def _positions(
    header, out, squares, used, T: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(squares + at, tl.zeros([1024], tl.int64), mask=at < used)
    n = tl.arange(0, BLOCK)
    lengths = tl.load(header + LENGTHS).to(tl.pointer_type(tl.int64))
    tl.store(out + n, tl.load(lengths + n // T, mask=n < TOKENS) + n % T, mask=n < TOKENS)


def positions(header: Tensor, out: Tensor) -> None:
    """Writes the positions of each row's next T tokens, from its length on, into out [B, T], and sets the sums of norms
    to zero."""
    tokens, squares = out.numel(), sums(out.device).begin()
    launch(
        _positions, (max(1, triton.cdiv(squares.numel(), 1024)),),
        header, out, squares, squares.numel(), out.shape[1], tokens, triton.next_power_of_2(tokens),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _finish(
    logits, scores, seed, numbers, header, ids, counts, left, ends, best, where, arrived, VOCAB, ENDS,
    SAMPLE: tl.constexpr, ROW_ENDS: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    count = tl.load(counts + row)
    if count > 0:
        kept = tl.load(header + LOGITS).to(tl.pointer_type(logits.dtype.element_ty))
        tl.store(kept + row * VOCAB + at, values, mask=at < VOCAB)
    merit = tl.load(scores + row * VOCAB + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
    if SAMPLE:
        position = (
            tl.load(tl.load(header + LENGTHS).to(tl.pointer_type(tl.int64)) + row) + 1
        )  # of the token to be drawn
        merit += gumbel(uniform(tl.load(seed), tl.load(numbers + row), position, 0, at))
    top = tl.max(merit, axis=0)
    tl.store(best + row * PARTS + part, top)
    tl.store(where + row * PARTS + part, tl.min(tl.where(merit == top, at, VOCAB), axis=0))
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrived + row, 0)
        if count > 0:
            parts = tl.arange(0, PARTS_BLOCK)
            tops = tl.load(best + row * PARTS + parts, mask=parts < PARTS, other=float("-inf"), cache_modifier=".cg")
            places = tl.load(where + row * PARTS + parts, mask=parts < PARTS, other=0, cache_modifier=".cg")
            chosen = tl.min(tl.where(tops == tl.max(tops, axis=0), places, VOCAB), axis=0)
            chosen = tl.minimum(chosen, VOCAB - 1)  # where every score is NaN
            fed = tl.load(ids + row)
            lengths = tl.load(header + LENGTHS).to(tl.pointer_type(tl.int64))
            written = tl.load(header + WRITTEN).to(tl.pointer_type(tl.int64))
            base = tl.load(header + BASE).to(tl.pointer_type(tl.int64))
            record = tl.load(header + RECORD).to(tl.pointer_type(tl.int64))
            length = tl.load(lengths + row)
            tl.store(record + row * tl.load(header + RECORD_WIDTH) + length, fed)
            tl.store(lengths + row, length + 1)
            tl.store(written + row, tl.maximum(tl.load(written + row), length + 1))
            tl.store(base + row, length + 1)
            end = tl.arange(0, ROW_ENDS)
            ended = tl.sum((tl.load(ends + end, mask=end < ENDS, other=-1) == fed).to(tl.int32), axis=0) > 0
            remaining = tl.load(left + row) - 1
            tl.store(left + row, remaining)
            tl.store(counts + row, ((remaining > 0) & (ended == 0)).to(tl.int64))
            tl.store(ids + row, chosen.to(tl.int64))


def finish(
    logits: Tensor,  # [B, V]: kept by the cache
    scores: Tensor,  # [B, V]: chosen from; the logits, or what processors made of them
    noise: tuple[Tensor, Tensor] | None,  # seed [1] and the rows' numbers [B], where tokens are drawn
    header: Tensor,
    ids: Tensor,  # [B, 1]: the tokens that were fed; becomes those to feed next
    counts: Tensor,  # [B]: 1 where the row takes part; becomes 0 where it ends
    left: Tensor,  # [B]: how many tokens each row may still make
    ends: Tensor,  # [E]: ids that end a row
    scratch: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Chooses the next tokens and commits the ones fed. A row with count 0 stays exactly as it is."""
    rows, vocab = logits.shape
    best, where, arrived = scratch
    seed, numbers = noise or (left, left)
    launch(
        _finish, (rows, best.shape[1]),
        logits, scores, seed, numbers, header, ids, counts, left, ends, best, where, arrived, vocab, len(ends),
        noise is not None, triton.next_power_of_2(max(len(ends), 1)), STRETCH, best.shape[1],
        triton.next_power_of_2(best.shape[1]), num_warps=8,
    )  # fmt: skip


@triton.jit
def _take_in(
    logits, header, ids, accepted, VOCAB, T: tl.constexpr, T_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    count = tl.load(accepted + row)
    if count > 0:
        at = part * BLOCK + tl.arange(0, BLOCK)
        kept = tl.load(header + LOGITS).to(tl.pointer_type(logits.dtype.element_ty))
        values = tl.load(logits + (row * T + count - 1) * VOCAB + at, mask=at < VOCAB)
        tl.store(kept + row * VOCAB + at, values, mask=at < VOCAB)
        if part == 0:
            lengths = tl.load(header + LENGTHS).to(tl.pointer_type(tl.int64))
            written = tl.load(header + WRITTEN).to(tl.pointer_type(tl.int64))
            base = tl.load(header + BASE).to(tl.pointer_type(tl.int64))
            record = tl.load(header + RECORD).to(tl.pointer_type(tl.int64))
            before, t = tl.load(lengths + row), tl.arange(0, T_BLOCK)
            fed = tl.load(ids + row * T + t, mask=t < count, other=0)
            tl.store(record + row * tl.load(header + RECORD_WIDTH) + before + t, fed, mask=t < count)
            after = before + count
            tl.store(lengths + row, after)
            tl.store(written + row, tl.maximum(tl.load(written + row), after))
            tl.store(base + row, after)


def take_in(logits: Tensor, header: Tensor, ids: Tensor, accepted: Tensor) -> None:
    """Commits each row's first `accepted` [B] of the tokens ids [B, T]: records them, keeps the logits [B, T, V] after
    the last of them and advances the marks. A row with 0 stays exactly as it is."""
    rows, T, vocab = logits.shape
    launch(
        _take_in, (rows, triton.cdiv(vocab, STRETCH)),
        logits, header, ids, accepted, vocab, T, triton.next_power_of_2(T), STRETCH,
        num_warps=8,
    )  # fmt: skip


def scratch_for(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What `finish` works with: the best of each stretch, where it is, and how many stretches are done."""
    parts = triton.cdiv(vocab, STRETCH)
    return (
        torch.zeros(rows, parts, device=device),
        torch.zeros(rows, parts, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )
