"""What is written down of every new token on request: logits, scores, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lamina.generation.settings.settings import Settings


@dataclass(frozen=True)
class Logprob:
    """The log-probability that the model gave a new token, and its `top` tokens with theirs, the best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Kept:
    """Of each row, one entry a new token; None where nobody asked.

    logits     [V] as the model gave them
    scores     [V] what the token was chosen from
    logprobs   of the token chosen and of the `top` best, by the logits
    """

    logits: list[list[Tensor]] | None = None
    scores: list[list[Tensor]] | None = None
    logprobs: list[list[Logprob]] | None = None
    top: int = 0

    @classmethod
    def of(cls, settings: Settings, rows: int) -> Kept | None:
        """What the settings ask for; None where that is nothing."""

        def asked(one: bool) -> list[list[Any]] | None:
            return [[] for _ in range(rows)] if one else None

        kept = cls(asked(settings.output_logits), asked(settings.output_scores), asked(settings.logprobs is not None))
        kept.top = settings.logprobs or 0
        return None if kept == cls() else kept

    def add(self, rows: Sequence[int], logits: Tensor, scores: Tensor, chosen: Tensor) -> None:
        """What was known when these rows [R] got the tokens chosen [R]; logits and scores [R, V]"""
        for kept, now in ((self.logits, logits), (self.scores, scores)):
            if kept is not None:
                for row, one in zip(rows, now.clone(), strict=True):
                    kept[row].append(one)
        if self.logprobs is not None:
            for row, one in zip(rows, logprobs_of(logits, chosen, self.top), strict=True):
                self.logprobs[row].append(one)

    def shorten(self, lengths: Sequence[int]) -> None:
        """Forgets what was written down past so many tokens of each row."""
        everything: list[list[list[Any]] | None] = [self.logits, self.scores, self.logprobs]
        for kept in everything:
            for row, length in zip(kept or (), lengths, strict=kept is not None):
                del row[length:]


def logprobs_of(logits: Tensor, chosen: Tensor, top: int) -> list[Logprob]:
    """Of each chosen token [R], by the logits [R, V]."""
    shares = logits.float().log_softmax(dim=-1)
    own = shares.gather(1, chosen[:, None])[:, 0].tolist()
    best = shares.topk(min(top, shares.shape[-1]), dim=-1)
    tops = [tuple(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [Logprob(*one) for one in zip(chosen.tolist(), own, tops, strict=True)]
