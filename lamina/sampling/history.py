"""`History`: the second argument of every processor: lengths and tokens of the rows, and how often each id occurred.

A `History` describes the rows at one token. Counts are computed from `tokens` when first needed. A captured step has no
`tokens` and passes counts and the last `RECENT` tokens instead. Slots past a row's length may hold anything. An id of
-1 inside the length is a token without an id (an embedding): it matches nothing and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.errors import InputError

RECENT = 2
"""Last tokens of each row that a captured step passes."""


@dataclass
class History:
    """Tokens and lengths of the rows [B] whose scores are processed; all tensors are on the device of the scores."""

    lengths: Tensor  # [B] tokens so far, prompt and new
    prompts: Tensor  # [B] how many of them are the prompt's
    tokens: Tensor | None = None  # [B, S] prompt and new, padded on the right with -1; None inside a captured step
    counts: Tensor | None = None  # [B, V] occurrences of each id in a row's tokens; computed on demand
    sources: Tensor | None = None  # [B, E] the encoder's ids, padded with -1
    prompt_counts: Tensor | None = None  # [B, V] occurrences of each id in a row's prompt; computed on demand
    rows: Sequence[int] | None = None  # the number of each row in the call of `generate`; None: 0, 1, 2 …
    recent: Tensor | None = None  # [B, RECENT] the last tokens, inside a captured step

    @property
    def ids(self) -> Tensor:
        """The tokens, with -1 past each row's length. [B, S]"""
        if self.tokens is None:
            raise InputError(
                "this history has no tokens: a captured step passes counts and lengths only. Set needs_tokens = True "
                "on the processor, so that plain passes run it"
            )
        return torch.where(_below(self.lengths, self.tokens.shape[1]), self.tokens, -1)

    @property
    def source_ids(self) -> Tensor:
        """The encoder's ids; without an encoder, the prompt's. [B, E], padded with -1"""
        if self.sources is not None:
            return self.sources
        return torch.where(_below(self.prompts, self.ids.shape[1]), self.ids, -1)

    def tail(self, n: int) -> Tensor:
        """The last n tokens of each row, padded with -1 on the left. [B, n]

        >>> History(torch.tensor([3, 1]), torch.tensor([1, 1]), torch.tensor([[5, 6, 7], [8, 0, 0]]), None).tail(2)
        tensor([[ 6,  7],
                [-1,  8]])
        """
        if self.tokens is None and self.recent is not None and n <= RECENT:
            return self.recent[:, RECENT - n :]
        ids = self.ids
        if ids.shape[1] == 0:
            return ids.new_full((len(ids), n), -1)
        at = self.lengths[:, None] + torch.arange(-n, 0, device=ids.device)
        return torch.where(at >= 0, ids.gather(1, at.clamp(min=0)), -1)

    def seen(self, vocab: int) -> Tensor:
        """How often each id occurs in each row's tokens. [B, V] int64"""
        if self.counts is None:
            self.counts = occurrences(self.ids, vocab)
        return self.counts

    def seen_in_prompt(self, vocab: int) -> Tensor:
        """How often each id occurs in each row's prompt. [B, V] int64"""
        if self.prompt_counts is None:
            ids = self.ids
            self.prompt_counts = occurrences(torch.where(_below(self.prompts, ids.shape[1]), ids, -1), vocab)
        return self.prompt_counts

    def seen_in_source(self, vocab: int) -> Tensor:
        """How often each id occurs in `source_ids`. [B, V] int64"""
        return self.seen_in_prompt(vocab) if self.sources is None else occurrences(self.sources, vocab)

    def numbers(self) -> Sequence[int]:
        """The number of each row in the call of `generate`."""
        return range(len(self.lengths)) if self.rows is None else self.rows

    def take(self, rows: Sequence[int]) -> History:
        """The history of these rows, in this order; a row may occur more than once."""
        at = on_device(rows, self.lengths.device)
        parts = (self.tokens, self.counts, self.sources, self.prompt_counts)
        tokens, counts, sources, prompt_counts = (None if part is None else part[at] for part in parts)
        own = self.numbers()
        numbers = [own[row] for row in rows]
        return History(self.lengths[at], self.prompts[at], tokens, counts, sources, prompt_counts, numbers)

    def and_then(self, ids: Tensor) -> History:
        """The same rows with the tokens ids [B, n] appended."""
        assert self.tokens is not None
        n = ids.shape[1]
        room = torch.nn.functional.pad(self.tokens, (0, n), value=-1)
        places = self.lengths[:, None] + torch.arange(n, device=ids.device)
        return replace(self, lengths=self.lengths + n, tokens=room.scatter(1, places, ids), counts=None)


Processor = Callable[[Tensor, History], Tensor]
"""(scores [B, V] float32, history) -> scores [B, V]. Must not modify its input, and should not wait for the device."""


def occurrences(ids: Tensor, vocab: int) -> Tensor:
    """How often each id from 0 to vocab - 1 occurs in each row of ids [B, S]; other ids are ignored. -> [B, V] int64

    >>> occurrences(torch.tensor([[2, 0, 2, -1, 9]]), 4)
    tensor([[1, 0, 2, 0]])
    """
    spare = torch.where((ids >= 0) & (ids < vocab), ids, vocab)
    counts = torch.zeros(len(ids), vocab + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(1, spare, torch.ones_like(spare))[:, :vocab]


def _below(lengths: Tensor, slots: int) -> Tensor:
    """Whether a slot is below its row's length. [B, S] bool"""
    return torch.arange(slots, device=lengths.device) < lengths[:, None]


def history_of(cache: Cache, prompts: Sequence[int], rows: Sequence[int] | None = None) -> History:
    """The history of a cache's rows, or of some of them. prompts: the number of prompt tokens of each."""
    lengths, record = cache.clock.lengths, cache.record
    if rows is not None:
        index = on_device(list(rows), record.device)
        lengths, record = lengths[index], record[index]
    longest = max(cache.clock.high[row] for row in (range(cache.rows) if rows is None else rows))
    return History(lengths.clone(), on_device(list(prompts), record.device), record[:, :longest], rows=rows)
