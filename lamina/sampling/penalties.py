"""Penalties: scores change with the ids that a row contains already, and with its length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling.bans import mask_of
from lamina.sampling.history import History
from lamina.sampling.kinds import LARGE, Custom, Number, Whole, Wrong, listed
from lamina.sampling.setting import ProcessorContext, Setting, Stage


@dataclass(frozen=True)
class Repetition:
    """For ids that occurred in the prompt or since: divides positive scores by the penalty and multiplies negative
    ones. Above 1 they become less likely, below 1 more likely. How often they occurred does not matter."""

    penalty: float
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise InputError(f"repetition_penalty must be above 0, not {self.penalty}; 1 changes nothing")

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where(history.seen(scores.shape[-1]) > 0, penalize(scores, self.penalty), scores)


@dataclass(frozen=True)
class SourceRepetition:
    """The opposite for ids of the source (the encoder's input; without an encoder, the prompt): above 1 they become
    more likely."""

    penalty: float
    needs_tokens: ClassVar[bool] = False
    needs_source: ClassVar[bool] = True
    excludes: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise InputError(f"encoder_repetition_penalty must be above 0, not {self.penalty}; 1 changes nothing")

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where(history.seen_in_source(scores.shape[-1]) > 0, penalize(scores, 1 / self.penalty), scores)


@dataclass(frozen=True)
class Occurrence:
    """Subtracts `frequency` × (number of occurrences) and `presence` × (1 if it occurred) from an id's score.

    Only new tokens count, as in OpenAI's definition and in vLLM; with `prompt=True` the prompt's count as well.
    Negative values make ids more likely that occurred.
    """

    frequency: float = 0.0
    presence: float = 0.0
    prompt: bool = False
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "none"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        vocab = scores.shape[-1]
        counts = history.seen(vocab)
        if not self.prompt:
            counts = counts - history.seen_in_prompt(vocab)
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class LengthDecay:
    """Makes end tokens likelier past `start` new tokens: a score s grows by |s| · (factor ** (tokens past start) - 1).
    Scores that are not finite stay."""

    start: int
    factor: float
    ends: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "none"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        past = (history.lengths - history.prompts - self.start).clamp(min=0)[:, None]
        growth = torch.pow(self.factor, past.to(scores.dtype)).clamp(max=torch.finfo(scores.dtype).max) - 1
        return torch.where(self.ends & scores.isfinite(), scores + scores.abs() * growth, scores)


def penalize(scores: Tensor, penalty: float) -> Tensor:
    """Scores that a penalty above 1 makes worse, whatever their sign."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _length_decay(given: tuple[int, float], context: ProcessorContext) -> LengthDecay:
    if not context.end_ids:
        raise InputError("exponential_decay_length_penalty raises the score of end tokens: give eos_token_id")
    start, factor = given
    return LengthDecay(start, factor, mask_of(context.end_ids, context.vocab, context.device, "eos_token_id"))


def _read_decay(value: object) -> tuple[int, float]:
    pair = listed(value, what := "a pair (from which new token, growth)")
    if len(pair) != 2:
        raise Wrong(what)
    return Whole(0).read(pair[0]), Number(0).read(pair[1])


SETTINGS = (
    Setting(
        "encoder_repetition_penalty", Number(1 / LARGE), default=1.0, stage=Stage.PENALTY,
        meaning="Above 1: tokens of the source (without an encoder, the prompt) are more likely.",
        processor=lambda penalty, context: SourceRepetition(penalty),
    ),
    Setting(
        "repetition_penalty", Number(1 / LARGE), default=1.0, stage=Stage.PENALTY,
        meaning="Above 1: tokens that occurred are less likely.",
        processor=lambda penalty, context: Repetition(penalty),
    ),
    Setting(
        "frequency_penalty", Number(-LARGE), default=0.0, stage=Stage.PENALTY,
        meaning="Subtracted from a token's score for each of its occurrences among the new tokens.",
        processor=lambda penalty, context: Occurrence(penalty, context.settings.presence_penalty or 0.0),
    ),
    Setting(
        "presence_penalty", Number(-LARGE), default=0.0, stage=Stage.PENALTY,
        meaning="Subtracted once from the score of every token that occurred among the new tokens.",
        # with a frequency_penalty, one processor does both
        processor=lambda penalty, context: None if context.settings.frequency_penalty else Occurrence(0.0, penalty),
    ),
    Setting(
        "exponential_decay_length_penalty",
        Custom("tuple[int, float]", "tuple[int, float] | Sequence[float]", _read_decay),
        default=None, stage=Stage.DECAY,
        meaning="(from which new token, growth): end tokens become more likely with every token after that.",
        processor=_length_decay,
    ),
)  # fmt: skip
