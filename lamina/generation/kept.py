"""What is written down of every new token on request: logits, scores, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lamina.generation.settings import Settings


@dataclass(frozen=True)
class Logprob:
    """The log-probability that the model gave a new token, and its `top` tokens with theirs, the best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Kept:
    """Of each row, one entry a new token.

    logits     [V] as the model gave them
    scores     [V] what the token was chosen from
    logprobs   of the token chosen and of the `top` best, by the logits
    """

    rows: int
    logits: list[list[Tensor]] | None = None
    scores: list[list[Tensor]] | None = None
    top: int | None = None
    logprobs: list[list[Logprob]] = field(default_factory=list)

    @classmethod
    def of(cls, settings: Settings, rows: int) -> Kept | None:
        """What the settings ask for; None where that is nothing."""
        if not (settings.output_logits or settings.output_scores or settings.logprobs is not None):
            return None
        logits, scores, logprobs = ([[] for _ in range(rows)] for _ in range(3))  # type: ignore[var-annotated]
        kept = cls(rows, None, None, settings.logprobs, logprobs)
        kept.logits = logits if settings.output_logits else None
        kept.scores = scores if settings.output_scores else None
        return kept

    def add(self, rows: Sequence[int], logits: Tensor, scores: Tensor, chosen: Tensor) -> None:
        """What was known when these rows [R] got the tokens chosen [R]; logits and scores [R, V]"""
        for kept, now in ((self.logits, logits), (self.scores, scores)):
            if kept is not None:
                for row, one in zip(rows, now.clone(), strict=True):
                    kept[row].append(one)
        if self.top is None:
            return
        shares = logits.float().log_softmax(dim=-1)
        own = shares.gather(1, chosen[:, None])[:, 0].tolist()
        best = shares.topk(min(self.top, shares.shape[-1]), dim=-1) if self.top else None
        for at, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            top = () if best is None else tuple(zip(best.indices[at].tolist(), best.values[at].tolist(), strict=True))
            self.logprobs[row].append(Logprob(token, own[at], top))
