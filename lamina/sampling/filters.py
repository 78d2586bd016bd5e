"""What sampling cuts away: ids that a filter does not keep get the score -inf, the others stay as they are.

Each filter is a processor that looks at one row's scores alone. `keep` is how many of the best ids always stay: one, or
more in beam sampling, where a beam must not be left with nothing but end tokens. They follow one another in the order
of `FILTERS`, each seeing what the one before left.
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

LEAST_TEMPERATURE = 1e-6
"""Below it scores that differ at all are further apart than the noise reaches, and large ones could overflow: the
settings take such a temperature for 0, which takes the best token."""
ENTROPY_IDS = 100  # how many of the best ids top-h looks at


class Filter(ABC):
    """Base of the filters that cut ids away; none of them reads tokens."""

    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where(self.cut(scores), -torch.inf, scores)

    @abstractmethod
    def cut(self, scores: Tensor) -> Tensor:
        """Which ids go; never one whose score is NaN, so that a broken model is not hidden. [B, V] bool"""


@dataclass(frozen=True)
class Temperature:
    """Divides the scores: below 1 sharper, above 1 flatter."""

    temperature: float
    needs_tokens: ClassVar[bool] = False

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
    """The best ids whose share of the entropy stays within `top_h` of the whole, both over the best 100."""

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
    """The k best ids, and those that equal the last of them."""

    k: int
    keep: int = 1

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"top_k must be at least 1, not {self.k}; 0 or None leaves it out of the settings")

    def cut(self, scores: Tensor) -> Tensor:
        return below_best(scores, max(self.k, self.keep))


@dataclass(frozen=True)
class TopP(Filter):
    """The fewest ids whose probabilities add up to p."""

    p: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise InputError(f"top_p must lie between 0 and 1, not {self.p}")

    def cut(self, scores: Tensor) -> Tensor:
        rising, ids = scores.sort(dim=-1, stable=True)
        over = rising.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.p
        over[:, -self.keep :] = False
        return over.scatter(-1, ids, over)


@dataclass(frozen=True)
class MinP(Filter):
    """Ids at least `p` times as likely as the best one."""

    p: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise InputError(f"min_p must lie between 0 and 1, not {self.p}")

    def cut(self, scores: Tensor) -> Tensor:
        likely = scores.softmax(dim=-1)
        best = likely.topk(min(self.keep, scores.shape[-1]), dim=-1).indices
        return (likely < self.p * likely.amax(dim=-1, keepdim=True)).scatter(-1, best, False)


@dataclass(frozen=True)
class Typical(Filter):
    """Ids whose surprise -log p is nearest to the row's entropy, as many as it takes to add up to `mass`."""

    mass: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.mass < 1:
            raise InputError(f"typical_p must lie between 0 and 1, not {self.mass}; 1 leaves it out of the settings")

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
    """Ids with a probability of at least `cutoff`."""

    cutoff: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.cutoff < 1:
            raise InputError(f"epsilon_cutoff must lie between 0 and 1, not {self.cutoff}")

    def cut(self, scores: Tensor) -> Tensor:
        return (scores.softmax(dim=-1) < self.cutoff) & below_best(scores, self.keep)


@dataclass(frozen=True)
class Eta(Filter):
    """As `Epsilon`, with a cutoff that sinks where the row is undecided: √cutoff · exp(-entropy) if that is less."""

    cutoff: float
    keep: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.cutoff < 1:
            raise InputError(f"eta_cutoff must lie between 0 and 1, not {self.cutoff}")

    def cut(self, scores: Tensor) -> Tensor:
        likely = scores.softmax(dim=-1)
        entropy = torch.special.entr(likely).sum(dim=-1, keepdim=True)
        eta = (self.cutoff**0.5 * (-entropy).exp()).clamp(max=self.cutoff)
        return (likely < eta) & below_best(scores, self.keep)


FILTERS = (Temperature, TopH, TopK, TopP, MinP, Typical, Epsilon, Eta)
"""The filters, in the order in which they are applied."""


def below_best(scores: Tensor, n: int) -> Tensor:
    """Whether an id is worse than the n-th best of its row. [B, V] bool"""
    return scores < scores.topk(min(n, scores.shape[-1]), dim=-1).values[:, -1:]
