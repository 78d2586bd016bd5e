"""`Run`: the input of every decoding strategy. It holds the cache after prefill, the chooser and the stopping rules.

A strategy is a function `Run -> StrategyOutput`. It feeds every token it chooses, including the last one of each row.
The cache then holds prompt and new tokens, so a later call continues it by feeding only the text that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.errors import InputError
from lamina.generation.result import Recorder
from lamina.generation.stopping import Reason, Stopping
from lamina.runtime.feed import feed_one
from lamina.sampling.chooser import Chooser
from lamina.sampling.exclusion import excluded, nothing_left
from lamina.sampling.history import History, history_of

if TYPE_CHECKING:
    from lamina.generation.settings.settings import Settings
    from lamina.generation.strategies.guide import Guide
    from lamina.model import Model

OnToken = Callable[[int, int, Reason | None], None]
"""on_token(row, token, reason): called for each new token, in order; reason: why the row ends, None if it goes on."""


@dataclass
class Run:
    """The state of a call of `generate` after prefill.

    cache            one row for each sequence to generate; holds the prompts
    logits           [B, V] after each row's prompt
    prompt_lengths   tokens that each row held before the first new one
    row_ids          per row; sampling draws depend on (seed, row id, position), see row_ids.py
    on_token         called for each new token, if the caller streams
    source_ids       [B, E] the encoder's ids, padded with -1; None for decoder-only models
    guide            classifier-free guidance; None without
    recorder         stores logits, scores and log-probabilities of new tokens; None if none were asked for
    call_rows        index of each row in the call of `generate`, which processors see; None: 0, 1, 2 …
    """

    model: Model
    cache: Cache
    logits: Tensor
    chooser: Chooser
    stopping: Stopping
    prompt_lengths: list[int]
    row_ids: list[int]
    settings: Settings
    on_token: OnToken | None = None
    source_ids: Tensor | None = None
    guide: Guide | None = None
    recorder: Recorder | None = None
    call_rows: list[int] | None = None

    @property
    def rows(self) -> int:
        return len(self.prompt_lengths)

    def history(self, rows: Sequence[int] | None = None) -> History:
        """The history that processors read, of these rows (all when None), as the cache holds them now."""
        some = range(self.rows) if rows is None else rows
        history = history_of(self.cache, [self.prompt_lengths[row] for row in some], rows)
        history.rows = list(some) if self.call_rows is None else [self.call_rows[row] for row in some]
        if self.source_ids is not None:
            history.sources = self.source_ids if rows is None else self.source_ids[list(rows)]
        return history

    def add_tokens(
        self, live: Sequence[int], chosen: Sequence[int], tokens: list[list[int]], reasons: list[str]
    ) -> list[int]:
        """Appends each live row's chosen token to `tokens` and checks whether the row ends; if so, writes the reason
        to `reasons`. -> indices into `live` of the rows that go on"""
        going = []
        for at, (row, token) in enumerate(zip(live, chosen, strict=True)):
            tokens[row].append(token)
            reason = self.stopping.put(row, token)
            if reason is None:
                going.append(at)
            else:
                reasons[row] = reason
            if self.on_token:
                self.on_token(row, token, reason)
        return going

    def to_host(self, chosen: Tensor, scores: Tensor, rows: Sequence[int]) -> list[int]:
        """The chosen tokens [R] of these rows as a list. Raises if `scores` [R, V] exclude every id of a row."""
        if not self.chooser.may_exclude_all:
            return chosen.tolist()
        tokens, out = torch.stack([chosen, excluded(scores, chosen).long()]).tolist()
        for row, is_out in zip(rows, out, strict=True):
            if is_out:
                raise self.no_token_error(row)
        return tokens

    def no_token_error(self, row: int) -> InputError:
        """The error for a row in which processors exclude every id."""
        return nothing_left(self.chooser.processors, row)

    def repeat(self, cache: Cache, rows: Sequence[int], times: int) -> Run:
        """The same run over a cache that holds `times` adjacent copies of each of these rows."""
        each = [row for row in rows for _ in range(times)]
        return replace(
            self,
            cache=cache,
            prompt_lengths=[self.prompt_lengths[row] for row in each],
            row_ids=[self.row_ids[row] for row in each],
            call_rows=each if self.call_rows is None else [self.call_rows[row] for row in each],
            source_ids=None if self.source_ids is None else self.source_ids[each],
        )

    def feed(self, ids: Tensor, rows: Sequence[int]) -> Tensor:
        """Feeds one token to each of these rows: ids [R] -> logits [R, V]"""
        return feed_one(self.model, self.cache, ids, rows)[0]


@dataclass
class StrategyOutput:
    """The new tokens of each row, why each row ended, and the cache that holds prompts and new tokens.

    how    how the tokens were decoded, in words; becomes `Result.how`
    more   values that only one strategy has, by name: sequence scores, beam indices, acceptance statistics
    """

    tokens: list[list[int]]
    reasons: list[str]
    cache: Cache
    how: str = "plain passes"
    more: dict[str, Any] = field(default_factory=dict)
