"""What is known of rows when their next tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.cache.cache import Cache


@dataclass
class History:
    """All tensors are on the device of the scores.

    lengths   [B] tokens so far, prompt and new
    prompts   [B] of them, the prompt's
    tokens    [B, S] prompt and new, padded on the right with -1; None inside a captured step
    counts    [B, V] how often each id occurs in the row, where that is kept; else `seen` counts the tokens
    sources   [B, E] an encoder's ids, padded with -1
    """

    lengths: Tensor
    prompts: Tensor
    tokens: Tensor | None = None
    counts: Tensor | None = None
    sources: Tensor | None = None

    def seen(self, vocab: int) -> Tensor:
        """[B, V] how often each id occurs among the row's tokens.

        >>> two = torch.tensor([2])
        >>> History(two, two, torch.tensor([[1, 1, -1]])).seen(3).tolist()
        [[0, 2, 0]]
        """
        if self.counts is None:
            assert self.tokens is not None
            real = self.tokens >= 0
            zeros = torch.zeros(len(self.lengths), vocab, dtype=torch.int64, device=self.lengths.device)
            return zeros.scatter_add_(1, self.tokens.clamp(min=0), real.to(torch.int64))
        return self.counts

    def take(self, rows: Tensor) -> History:
        """The history of some rows, in that order; a row may be named more than once."""
        parts = (self.tokens, self.counts, self.sources)
        tokens, counts, sources = (None if part is None else part[rows] for part in parts)
        return History(self.lengths[rows], self.prompts[rows], tokens, counts, sources)

    def and_then(self, ids: Tensor) -> History:
        """The same rows with more tokens: ids [B, n]."""
        assert self.tokens is not None
        n = ids.shape[1]
        room = torch.nn.functional.pad(self.tokens, (0, n), value=-1)
        places = self.lengths[:, None] + torch.arange(n, device=ids.device)
        return replace(self, lengths=self.lengths + n, tokens=room.scatter(1, places, ids), counts=None)


Processor = Callable[[Tensor, History], Tensor]
"""scores [B, V] float32 -> scores [B, V]; pure, and without waiting for the device."""


def history_of(cache: Cache, prompts: Sequence[int], rows: Sequence[int] | None = None) -> History:
    """What a cache knows of its rows, or of some of them. prompts: how many tokens of each are the prompt's."""
    lengths, record = cache.lengths, cache.record
    if rows is not None:
        index = torch.tensor(list(rows), device=record.device)
        lengths, record = lengths[index], record[index]
    longest = max(cache.clock.high[row] for row in (range(cache.rows) if rows is None else rows))
    record = record[:, :longest]
    there = torch.arange(record.shape[1], device=record.device) < lengths[:, None]
    return History(lengths.clone(), torch.tensor(list(prompts), device=record.device), record.masked_fill(~there, -1))
