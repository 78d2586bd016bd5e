"""Scores lowered or raised by what a row holds already: ids that occurred, and the length it has reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling.history import History


@dataclass(frozen=True)
class Repetition:
    """Ids that occurred, in the prompt or since: a positive score is divided by the penalty, a negative one multiplied.
    Above 1 makes them less likely, below 1 more; how often they occurred does not matter."""

    penalty: float
    needs_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise InputError(f"repetition_penalty must be above 0, not {self.penalty}; 1 changes nothing")

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where(history.seen(scores.shape[-1]) > 0, lowered(scores, self.penalty), scores)


@dataclass(frozen=True)
class SourceRepetition:
    """The reverse for ids of the source, which is the encoder's or, without one, the prompt: above 1 makes them
    likelier."""

    penalty: float
    needs_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise InputError(f"encoder_repetition_penalty must be above 0, not {self.penalty}; 1 changes nothing")

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where(history.seen_in_source(scores.shape[-1]) > 0, lowered(scores, 1 / self.penalty), scores)


@dataclass(frozen=True)
class Occurrence:
    """Takes `frequency` × (how often an id occurred) and `presence` × (whether it did) off its score.

    Only NEW tokens count, as in OpenAI's definition and in vLLM: what the prompt says is not held against the model.
    `prompt=True` counts the prompt's tokens as well. Negative numbers make ids likelier that occurred.
    """

    frequency: float = 0.0
    presence: float = 0.0
    prompt: bool = False
    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        vocab = scores.shape[-1]
        counts = history.seen(vocab)
        if not self.prompt:
            counts = counts - history.seen_in_prompt(vocab)
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class LengthDecay:
    """Past `start` new tokens an end token's score s grows by |s| · (factor ** (tokens past start) - 1): a factor above
    1 makes the end ever likelier. Scores that are not finite stay."""

    start: int
    factor: float
    ends: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        past = (history.lengths - history.prompts - self.start).clamp(min=0)[:, None]
        growth = torch.pow(self.factor, past.to(scores.dtype)).clamp(max=torch.finfo(scores.dtype).max) - 1
        return torch.where(self.ends & scores.isfinite(), scores + scores.abs() * growth, scores)


def lowered(scores: Tensor, penalty: float) -> Tensor:
    """Scores made worse by a penalty above 1, whatever their sign."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)
