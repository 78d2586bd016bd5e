"""What the laws stand on, checked before them.

determinism   the same pass twice gives the same bits: uncached, over caches, and uncached again after all laws
inputs        a block leaves its input, what blocks share, and the positions as they were
precision     the uncached pass is as far from double precision as rounding explains

A model that draws random numbers, counts its calls or keeps something between passes fails the first. Where one of
these fails there is nothing to compare with, and no law is tried.

On a CPU equal means bit for bit. A GPU may add up in another order each time (atomics): there a difference of a few
steps of the last bit is let pass, and the table says "rounding" in place of "ok".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.checking import tolerance
from lamina.checking.laws import Way
from lamina.checking.reference import Reference
from lamina.checking.watch import Watch, same_bits

BASICS = ("determinism", "inputs", "precision")


class Found(NamedTuple):
    """Where two equal passes differ, or one of them raises: block None is the model outside its blocks."""

    block: int | None
    row: int
    position: int
    error: float
    way: str
    raised: Exception | None = None


def recorded(reference: Reference, way: str) -> Iterator[Found]:
    """The uncached pass over each row, for the first time. What the first of all raises is the caller's."""
    for s in range(len(reference.rows)):
        try:
            reference.record(s)
        except Exception as error:
            if s == 0 or isinstance(error, torch.OutOfMemoryError):
                raise
            yield Found(reference.watches[s].running, s, 0, torch.inf, way, error)
            return


def repeated(reference: Reference, way: str) -> Iterator[Found]:
    """Every uncached pass once more."""
    for s, earlier in enumerate(reference.watches):
        later = Watch(reference.model, earlier)
        try:
            logits = reference.uncached(s, later)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            yield Found(later.running, s, 0, torch.inf, way, error)
            return
        yield from _compared(earlier, later, reference.logits[s][None], logits[None], [len(logits)], [s], [0], way)


def repeated_over_caches(reference: Reference, ways: Sequence[Way], residence: str) -> Iterator[Found]:
    """A prompt of another length in each row, then one token, then some: twice, over caches that are alike."""
    rows, model = reference.rows, reference.model
    for way in ways:
        caches = []
        for _ in range(2):
            caches.append(model.new_cache(len(rows), way.capacity, way.slack, residence=residence))
            for s, source in enumerate(reference.sources or []):
                caches[-1].attach(source, rows=[s])
        done = [0] * len(rows)
        for counts in ([max(1, len(row) // 2 - 1) for row in rows], [1] * len(rows), [3] * len(rows)):
            counts = [min(count, len(row) - at) for count, row, at in zip(counts, rows, done, strict=True)]
            if not any(counts):
                break
            parts = [reference.ids[s][at : at + n] for s, (at, n) in enumerate(zip(done, counts, strict=True))]
            batch = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).to(model.device)
            watches: list[Watch] = []
            outs: list[Tensor] = []
            for cache in caches:
                watches.append(Watch(model, watches[0] if watches else None))
                try:
                    with watches[-1].on():
                        out = model(batch, cache=cache, counts=None if min(counts) == max(counts) else counts)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    yield Found(watches[-1].running, 0, done[0], torch.inf, str(way), error)
                    return
                assert out is not None
                outs.append(out)
            yield from _compared(
                watches[0], watches[1], outs[0], outs[1], counts, list(range(len(rows))), done, str(way)
            )
            done = [at + n for at, n in zip(done, counts, strict=True)]


def _compared(
    earlier: Watch,
    later: Watch,
    logits: Tensor,
    again: Tensor,
    counts: list[int],
    rows: list[int],
    starts: list[int],
    way: str,
) -> Iterator[Found]:
    pairs = [*zip(earlier.outputs, later.outputs, strict=False)]
    suspects: list[tuple[int | None, Tensor, Tensor]] = [(i, *pairs[i]) for i in later.differing(counts)]
    outside = [*zip(earlier.inputs[:1], later.inputs[:1], strict=False), (logits, again)]
    suspects += [(None, then, now) for then, now in outside if not bool(same_bits(then, now, counts).all())]
    for block, then, now in suspects:
        differ = ~same_bits(then, now, counts)  # [R, T]
        position, row = (int(i) for i in differ.T.nonzero()[0])
        exact = then[differ]
        error = float(tolerance.errors(now[differ], exact, tolerance.scales(exact)).max())
        yield Found(block, rows[row], starts[row] + position, error, way)
