"""`Chooser`: logits -> processed scores -> the next token of each row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lamina.sampling.chain import apply
from lamina.sampling.exclusion import may_exclude_all
from lamina.sampling.history import History, Processor
from lamina.sampling.noise import draw


@dataclass(frozen=True)
class Chooser:
    """Applies processors to logits and chooses a token. Frozen and hashable: captured steps are keyed by it.

    processors  change the scores, in this order; the sampling filters are among them
    sample      True draws from softmax(scores), False takes the argmax
    seed        a draw depends on (seed, row number, position) and nothing else
    """

    processors: tuple[Processor, ...] = ()
    sample: bool = False
    seed: int = 0

    def scores(self, logits: Tensor, history: History) -> Tensor:
        """logits [B, V] -> processed scores [B, V] in float32"""
        return apply(logits.float(), history, self.processors)

    @cached_property
    def may_exclude_all(self) -> bool:
        """Whether the processors could leave a row without any id to choose."""
        return may_exclude_all(self.processors)

    def choose(self, scores: Tensor, numbers: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
        """The next token of each row [B]. numbers [B]: row numbers for the noise; positions [B]: of the new tokens."""
        if not self.sample:
            return scores.argmax(dim=-1)
        return draw(scores, self.seed, numbers, positions, stream)
