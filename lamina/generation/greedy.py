"""Greedy decoding after the prompt: plain passes, or a captured step replayed. Both give the same tokens.

Every new token is fed to the cache, the last one too: what the cache holds is prompt and new tokens, so it can be
continued by giving only what comes next. Rows that have ended take no part in later passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.generation.run import Chooser

if TYPE_CHECKING:
    from lamina.model import Model

Told = Callable[[int, int, bool], None]
"""told(row, token, last): called for each new token, in order."""

AHEAD = 8  # captured steps that are queued before the last ones are looked at


def plainly(
    model: Model, cache: Cache, logits: Tensor, most: int, ends: set[int], told: Told | None
) -> list[list[int]]:
    """One pass a token over the rows that go on. logits [B, V] are those after the prompt."""
    tokens: list[list[int]] = [[] for _ in range(cache.rows)]
    live = list(range(cache.rows))
    while live:
        chosen = logits.argmax(dim=-1)
        going = []  # indices into `live`
        for at, (row, token) in enumerate(zip(live, chosen.tolist(), strict=True)):
            tokens[row].append(token)
            last = token in ends or len(tokens[row]) == most
            if not last:
                going.append(at)
            if told:
                told(row, token, last)
        logits = feed(model, chosen, cache, live)[going]
        live = [live[at] for at in going]
    return tokens


def feed(model: Model, ids: Tensor, cache: Cache, rows: list[int]) -> Tensor:
    """Feeds one token to each of these rows; -> logits [len(rows), vocab]"""
    step = cache.step(1, rows=None if len(rows) == cache.rows else rows)
    try:
        logits = model.forward(ids[:, None], step, logits="last")
    except BaseException:
        step.abort()
        raise
    step.commit()
    assert logits is not None
    return logits


def captured(
    model: Model, cache: Cache, logits: Tensor, most: int, ends: set[int], told: Told | None
) -> list[list[int]]:
    """The same through one captured step. The device decides which rows go on; the host looks at it late, or after
    every token when someone is to be told."""
    start = cache.clock.sync()
    step = model.graphs.step(cache.rows, Chooser())
    first = logits.argmax(dim=-1)
    step.take_up(cache, first, [most] * cache.rows, ends)
    if told:
        current, live = first.tolist(), [True] * cache.rows
        while any(live):
            step.run(1)
            going = step.counts.tolist()
            for row, token in enumerate(current):
                if live[row]:
                    told(row, token, not going[row])
            current, live = step.ids[:, 0].tolist(), [bool(one) for one in going]
    else:
        flags = _Flags(step.counts)
        for done in range(0, most, AHEAD):
            step.run(min(AHEAD, most - done))
            if not flags.any_left():
                break
    lengths = cache.clock.sync()
    return [row[a:b] for row, a, b in zip(cache.record.tolist(), start, lengths, strict=True)]


class _Flags:
    """Whether any row goes on, as it was one look before: the device never waits for the host."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self.seen = torch.ones(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self.event = torch.cuda.Event() if counts.is_cuda else None
        self.looked = False

    def any_left(self) -> bool:
        if self.looked and self.event is not None:
            self.event.synchronize()
        left = bool(self.seen.any())
        self.seen.copy_(self.counts, non_blocking=True)
        if self.event is not None:
            self.event.record()
        self.looked = True
        return left
