"""Sampling filters: ids that a filter drops get the score -inf, all others keep their score.

A filter looks at the scores of each row alone. `keep` is the number of best ids that always stay: one, or with beams
enough that a beam is never left with end tokens only. Filters run in the order of `SETTINGS` below, each on the scores
that the one before returned. To add one, write its class and its `Setting`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling.history import History
from lamina.sampling.kinds import Number, Whole
from lamina.sampling.setting import Setting, Stage

LEAST_TEMPERATURE = 1e-6
"""Below it any difference of scores exceeds the noise, and large scores could overflow: `generate` treats such a
temperature as 0, which is greedy."""
ENTROPY_IDS = 100  # top-h looks at this many of the best ids


class Filter(ABC):
    """Base of the filters that drop ids. Needs no tokens, so it can be part of a captured step."""

    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "none"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where(self.cut(scores), -torch.inf, scores)

    @abstractmethod
    def cut(self, scores: Tensor) -> Tensor:
        """Which ids are dropped, at most all but one of a row. Never an id whose score is NaN: that would hide a broken
        model. scores [B, V] -> [B, V] bool"""


@dataclass(frozen=True)
class Temperature:
    """Divides the scores: below 1 sharpens the distribution, above 1 flattens it."""

    temperature: float
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise InputError(
                f"temperature must be finite and at least {LEAST_TEMPERATURE:g}, not {self.temperature}; "
                "do_sample=False takes the best token"
            )

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return scores / self.temperature


@dataclass(frozen=True)
class TopH(Filter):
    """Keeps the best ids while their summed entropy is at most `top_h` of the entropy of the best 100."""

    top_h: float

    def __post_init__(self) -> None:
        if not 0 < self.top_h <= 1:
            raise InputError(f"top_h must be above 0 and at most 1, not {self.top_h}")

    def cut(self, scores: Tensor) -> Tensor:
        best, ids = scores.topk(min(ENTROPY_IDS, scores.shape[-1]), dim=-1)
        entropy = torch.special.entr(best.softmax(dim=-1))
        over = entropy.cumsum(dim=-1) > self.top_h * entropy.sum(dim=-1, keepdim=True)
        over[:, 0] = False
        return torch.ones_like(scores, dtype=torch.bool).scatter(-1, ids, over)


@dataclass(frozen=True)
class TopK(Filter):
    """Keeps the k best ids, and ids that score the same as the k-th."""

    k: int
    keep: int = 1

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"top_k must be at least 1, not {self.k}; as a setting, 0 turns it off")

    def cut(self, scores: Tensor) -> Tensor:
        return below_best(scores, max(self.k, self.keep))


@dataclass(frozen=True)
class TopP(Filter):
    """Keeps the fewest ids whose probabilities sum to at least p."""

    p: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise InputError(f"top_p must be from 0 to 1, not {self.p}")

    def cut(self, scores: Tensor) -> Tensor:
        rising, ids = scores.sort(dim=-1, stable=True)
        over = rising.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.p
        over[:, -self.keep :] = False
        return over.scatter(-1, ids, over)


@dataclass(frozen=True)
class MinP(Filter):
    """Keeps ids whose probability is at least `p` times that of the best id."""

    p: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise InputError(f"min_p must be from 0 to 1, not {self.p}")

    def cut(self, scores: Tensor) -> Tensor:
        likely = scores.softmax(dim=-1)
        best = likely.topk(min(self.keep, scores.shape[-1]), dim=-1).indices
        return (likely < self.p * likely.amax(dim=-1, keepdim=True)).scatter(-1, best, False)


@dataclass(frozen=True)
class Typical(Filter):
    """Keeps the ids whose surprise -log p is nearest to the row's entropy, until their probabilities sum to `mass`."""

    mass: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.mass < 1:
            raise InputError(f"typical_p must be between 0 and 1, not {self.mass}; as a setting, 1 turns it off")

    def cut(self, scores: Tensor) -> Tensor:
        surprise = -scores.log_softmax(dim=-1)
        entropy = (surprise * (-surprise).exp()).nansum(dim=-1, keepdim=True)  # 0 · inf counts as 0
        far, ids = (surprise - entropy).abs().sort(dim=-1, stable=True)
        before = scores.gather(-1, ids).softmax(dim=-1).cumsum(dim=-1) < self.mass
        last = before.sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
        over = far > far.gather(-1, last)
        over[:, : self.keep] = False
        return over.scatter(-1, ids, over)


@dataclass(frozen=True)
class Epsilon(Filter):
    """Keeps ids with a probability of at least `cutoff`."""

    cutoff: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.cutoff < 1:
            raise InputError(f"epsilon_cutoff must be between 0 and 1, not {self.cutoff}; as a setting, 0 turns it off")

    def cut(self, scores: Tensor) -> Tensor:
        return (scores.softmax(dim=-1) < self.cutoff) & below_best(scores, self.keep)


@dataclass(frozen=True)
class Eta(Filter):
    """As `Epsilon`, with a cutoff that falls as the entropy rises: min(cutoff, √cutoff · exp(-entropy))."""

    cutoff: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.cutoff < 1:
            raise InputError(f"eta_cutoff must be between 0 and 1, not {self.cutoff}; as a setting, 0 turns it off")

    def cut(self, scores: Tensor) -> Tensor:
        likely = scores.softmax(dim=-1)
        entropy = torch.special.entr(likely).sum(dim=-1, keepdim=True)
        eta = (self.cutoff**0.5 * (-entropy).exp()).clamp(max=self.cutoff)
        return (likely < eta) & below_best(scores, self.keep)


def below_best(scores: Tensor, n: int) -> Tensor:
    """Whether an id scores less than the n-th best of its row. [B, V] bool"""
    return scores < scores.topk(min(n, scores.shape[-1]), dim=-1).values[:, -1:]


SETTINGS = (
    Setting(
        "temperature", Number(0), default=1.0, stage=Stage.FILTER,
        meaning="Divides the scores: below 1 sharpens the distribution, above 1 flattens it, 0 is greedy.",
        processor=lambda temperature, context: Temperature(temperature),
    ),
    Setting(
        "top_h", Number(0, 1, above=True), default=None, stage=Stage.FILTER,
        meaning="Keep the best tokens up to this share of the entropy.",
        processor=lambda share, context: TopH(share),
    ),
    Setting(
        "top_k", Whole(0), default=50, off=0, stage=Stage.FILTER,
        meaning="Keep this many best tokens (50 as in transformers); 0 keeps all. Contrastive search: candidates.",
        processor=lambda k, context: TopK(k, context.keep),
    ),
    Setting(
        "top_p", Number(0, 1), default=1.0, stage=Stage.FILTER,
        meaning="Keep the best tokens whose probabilities sum to this.",
        processor=lambda p, context: TopP(p, context.keep),
    ),
    Setting(
        "min_p", Number(0, 1), default=None, stage=Stage.FILTER,
        meaning="Keep tokens with at least this share of the best token's probability.",
        processor=lambda p, context: MinP(p, context.keep),
    ),
    Setting(
        "typical_p", Number(0, 1, above=True), default=1.0, stage=Stage.FILTER,
        meaning="Keep the most typical tokens whose probabilities sum to this.",
        processor=lambda mass, context: Typical(mass, context.keep),
    ),
    Setting(
        "epsilon_cutoff", Number(0, 1), default=0.0, stage=Stage.FILTER,
        meaning="Keep tokens with at least this probability.",
        processor=lambda cutoff, context: Epsilon(cutoff, context.keep),
    ),
    Setting(
        "eta_cutoff", Number(0, 1), default=0.0, stage=Stage.FILTER,
        meaning="As epsilon_cutoff, with a cutoff that falls as the entropy rises.",
        processor=lambda cutoff, context: Eta(cutoff, context.keep),
    ),
)  # fmt: skip
