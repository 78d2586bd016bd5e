"""What every strategy works with: rows of a cache after their prompts, how tokens are chosen, and when rows end.

A strategy is a function `Run -> Made`. It feeds every token it makes, the last one of a row too, so that the cache
holds prompt and new tokens and can be continued by giving only what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.errors import InputError
from lamina.generation.kept import Kept
from lamina.generation.stopping import Reason, Stopping
from lamina.runtime.feed import feed_one
from lamina.sampling.chooser import Chooser
from lamina.sampling.exclusion import excluded, nothing_left
from lamina.sampling.history import History, history_of

if TYPE_CHECKING:
    from lamina.generation.settings.settings import Settings
    from lamina.generation.strategies.guide import Guide
    from lamina.model import Model

Told = Callable[[int, int, Reason | None], None]
"""told(row, token, reason): called for each new token, in order; the reason why the row ends is given with its last."""


@dataclass
class Run:
    """A call of `generate` once the prompts are in.

    cache     holds the prompts, one row for each sequence that is made
    logits    [B, V] after each row's prompt
    prompts   how many tokens each row held before the first new one
    numbers   what draws depend on besides the seed and the position (row_ids.py)
    places    which row of the call each row is, as processors count them; None: 0, 1, 2 …
    source    [B, E] the encoder's ids, padded with -1, for models that have one
    guide     leads scores away from a negative prompt
    kept      what is written down of every token
    """

    model: Model
    cache: Cache
    logits: Tensor
    chooser: Chooser
    stopping: Stopping
    prompts: list[int]
    numbers: list[int]
    settings: Settings
    told: Told | None = None
    source: Tensor | None = None
    guide: Guide | None = None
    kept: Kept | None = None
    places: list[int] | None = None

    @property
    def rows(self) -> int:
        return len(self.prompts)

    def history(self, rows: Sequence[int] | None = None) -> History:
        """Of all rows, or of some; as the cache holds them now."""
        some = range(self.rows) if rows is None else rows
        history = history_of(self.cache, [self.prompts[row] for row in some], rows)
        history.rows = list(some) if self.places is None else [self.places[row] for row in some]
        if self.source is not None:
            history.sources = self.source if rows is None else self.source[list(rows)]
        return history

    def take(
        self, live: Sequence[int], chosen: Sequence[int], tokens: list[list[int]], reasons: list[str]
    ) -> list[int]:
        """Adds the chosen token of each live row to `tokens`, and why the row ends, if it does, to `reasons`. -> which
        of the live rows go on, as indices into `live`"""
        going = []
        for at, (row, token) in enumerate(zip(live, chosen, strict=True)):
            tokens[row].append(token)
            reason = self.stopping.put(row, token)
            if reason is None:
                going.append(at)
            else:
                reasons[row] = reason
            if self.told:
                self.told(row, token, reason)
        return going

    def read(self, chosen: Tensor, scores: Tensor, rows: Sequence[int]) -> list[int]:
        """The chosen tokens [R] of these rows on the host; an error where `scores` [R, V] leave one nothing."""
        if not self.chooser.may_exclude_all:
            return chosen.tolist()
        tokens, out = torch.stack([chosen, excluded(scores, chosen).long()]).tolist()
        for row, is_out in zip(rows, out, strict=True):
            if is_out:
                raise self.nothing_left(row)
        return tokens

    def nothing_left(self, row: int) -> InputError:
        """The error for a row in which every id is excluded."""
        return nothing_left(self.chooser.processors, row)

    def spread(self, cache: Cache, rows: Sequence[int], times: int) -> Run:
        """The run over a cache in which each of these rows stands `times` times, side by side."""
        each = [row for row in rows for _ in range(times)]
        return replace(
            self,
            cache=cache,
            prompts=[self.prompts[row] for row in each],
            numbers=[self.numbers[row] for row in each],
            places=each if self.places is None else [self.places[row] for row in each],
            source=None if self.source is None else self.source[each],
        )

    def feed(self, ids: Tensor, rows: Sequence[int]) -> Tensor:
        """Feeds one token to each of these rows: ids [R] -> logits [R, V]"""
        return feed_one(self.model, self.cache, ids, rows)[0]


@dataclass
class Made:
    """What a strategy made: new tokens of each row, why each ended, and the cache that holds prompts and new tokens.

    how    the way it was decoded, in words
    more   what else is known, by name: sequence scores, beam indices, acceptance statistics …
    """

    tokens: list[list[int]]
    reasons: list[str]
    cache: Cache
    how: str = "plain passes"
    more: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def one_by_one(run: Run, first: Tensor | None = None) -> Made:
    """Greedy or sampled, one pass a token over the rows that go on.

    first   [B] the first tokens, where they are chosen and told already
    """
    tokens: list[list[int]] = [[] for _ in range(run.rows)]
    reasons = [""] * run.rows
    live, logits = list(range(run.rows)), run.logits
    numbers = torch.tensor(run.numbers, device=logits.device)
    if first is not None:
        tokens = [[token] for token in first.tolist()]
        reasons = [reason or "" for reason in run.stopping.reasons]
        live = [row for row, reason in enumerate(reasons) if not reason]
        logits = run.feed(first, range(run.rows))[live]
    while live:
        history = run.history(live)
        led = logits if run.guide is None else run.guide.lead(logits, live)
        scores = run.chooser.scores(led, history)
        chosen = run.chooser.choose(scores, numbers[live], history.lengths)
        going = run.take(live, run.read(chosen, scores, live), tokens, reasons)
        if run.kept is not None:
            run.kept.add(live, logits, scores, chosen)
        logits = run.feed(chosen, live)[going]
        live = [live[at] for at in going]
        if run.guide is not None and live:
            run.guide.feed(chosen[going], live)
    return Made(tokens, reasons, run.cache)
