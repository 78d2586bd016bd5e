"""What processors know of the rows whose scores they change: lengths, tokens, and how often each id occurred.

A `History` is of one moment. What is asked of it is made from `tokens` once; where there are none (inside a captured
step) the maker gives counts instead. Slots past a row's length may hold anything, and an id of -1 inside it is a token
without an id (an embedding): it equals nothing and is never counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.errors import InputError


@dataclass
class History:
    """What is known of the rows whose scores are processed: all tensors on the device of the scores."""

    lengths: Tensor  # [B] tokens so far, prompt and new
    prompts: Tensor  # [B] of them, the prompt's
    tokens: Tensor | None = None  # [B, S] prompt and new, padded on the right with -1; None inside a captured step
    counts: Tensor | None = None  # [B, V] how often each id occurs among a row's tokens; made from tokens on demand
    sources: Tensor | None = None  # [B, E] an encoder's ids, padded with -1
    prompt_counts: Tensor | None = None  # [B, V] of counts, the prompt's share; made from tokens on demand
    rows: Sequence[int] | None = None  # each row's own number, as its maker counts them; None: 0, 1, 2 …

    @property
    def ids(self) -> Tensor:
        """The tokens, with -1 past each row's length. [B, S]"""
        if self.tokens is None:
            raise InputError("this history has no tokens: inside a captured step only counts and lengths are known")
        return torch.where(_below(self.lengths, self.tokens.shape[1]), self.tokens, -1)

    @property
    def source_ids(self) -> Tensor:
        """The encoder's ids; without an encoder, the prompt's. [B, E], -1 where there is none"""
        if self.sources is not None:
            return self.sources
        return torch.where(_below(self.prompts, self.ids.shape[1]), self.ids, -1)

    def tail(self, n: int) -> Tensor:
        """The last n tokens of each row, -1 in front where it has fewer. [B, n]

        >>> History(torch.tensor([3, 1]), torch.tensor([1, 1]), torch.tensor([[5, 6, 7], [8, 0, 0]]), None).tail(2)
        tensor([[ 6,  7],
                [-1,  8]])
        """
        ids = self.ids
        if ids.shape[1] == 0:
            return ids.new_full((len(ids), n), -1)
        at = self.lengths[:, None] + torch.arange(-n, 0, device=ids.device)
        return torch.where(at >= 0, ids.gather(1, at.clamp(min=0)), -1)

    def seen(self, vocab: int) -> Tensor:
        """How often each id occurs among a row's tokens. [B, V] int64"""
        if self.counts is None:
            self.counts = occurrences(self.ids, vocab)
        return self.counts

    def seen_in_prompt(self, vocab: int) -> Tensor:
        """The prompt's share of `seen`. [B, V] int64"""
        if self.prompt_counts is None:
            ids = self.ids
            self.prompt_counts = occurrences(torch.where(_below(self.prompts, ids.shape[1]), ids, -1), vocab)
        return self.prompt_counts

    def seen_in_source(self, vocab: int) -> Tensor:
        """How often each id occurs in `source_ids`. [B, V] int64"""
        return self.seen_in_prompt(vocab) if self.sources is None else occurrences(self.sources, vocab)

    def numbers(self) -> Sequence[int]:
        """Each row's own number."""
        return range(len(self.lengths)) if self.rows is None else self.rows

    def take(self, rows: Sequence[int]) -> History:
        """The history of some rows, in that order; a row may be named more than once."""
        at = on_device(rows, self.lengths.device)
        parts = (self.tokens, self.counts, self.sources, self.prompt_counts)
        tokens, counts, sources, prompt_counts = (None if part is None else part[at] for part in parts)
        own = self.numbers()
        numbers = [own[row] for row in rows]
        return History(self.lengths[at], self.prompts[at], tokens, counts, sources, prompt_counts, numbers)

    def and_then(self, ids: Tensor) -> History:
        """The same rows with more tokens: ids [B, n]."""
        assert self.tokens is not None
        n = ids.shape[1]
        room = torch.nn.functional.pad(self.tokens, (0, n), value=-1)
        places = self.lengths[:, None] + torch.arange(n, device=ids.device)
        return replace(self, lengths=self.lengths + n, tokens=room.scatter(1, places, ids), counts=None)


Processor = Callable[[Tensor, History], Tensor]
"""scores [B, V] float32 -> scores [B, V]; never changes its input, and the device waits for nobody."""


def occurrences(ids: Tensor, vocab: int) -> Tensor:
    """How often each id below `vocab` occurs in each row of ids [B, S]; others count nowhere. -> [B, V] int64

    >>> occurrences(torch.tensor([[2, 0, 2, -1, 9]]), 4)
    tensor([[1, 0, 2, 0]])
    """
    spare = torch.where((ids >= 0) & (ids < vocab), ids, vocab)
    counts = torch.zeros(len(ids), vocab + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(1, spare, torch.ones_like(spare))[:, :vocab]


def _below(lengths: Tensor, slots: int) -> Tensor:
    """[B, S]: whether a slot lies inside its row."""
    return torch.arange(slots, device=lengths.device) < lengths[:, None]


def history_of(cache: Cache, prompts: Sequence[int], rows: Sequence[int] | None = None) -> History:
    """What a cache knows of its rows, or of some of them. prompts: how many tokens of each are the prompt's."""
    lengths, record = cache.clock.lengths, cache.record
    if rows is not None:
        index = on_device(list(rows), record.device)
        lengths, record = lengths[index], record[index]
    longest = max(cache.clock.high[row] for row in (range(cache.rows) if rows is None else rows))
    return History(lengths.clone(), on_device(list(prompts), record.device), record[:, :longest], rows=rows)
