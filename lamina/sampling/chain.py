"""The processors that settings ask for, in the order in which they change scores.

A processor is any callable (scores [B, V] float32, history) -> scores [B, V] (history.py). Ours are small frozen
dataclasses with a few class attributes:

    needs_tokens   False if lengths, counts and `history.tail(2)` suffice, so that the processor can be part of a
                   captured step
    excludes       which ids of a row it may ban: "none", "some" or "all" (exclusion.py)
    setting        of those that ban: the name of their setting, for the error about a row without any id left

The settings declare the factories of their processors, and `Stage` (setting.py) is the order. Guidance comes before all
of them, in the decoding loop.

A caller's own processor that has the type of a built-in one replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lamina.sampling import bans, filters, forcing, grammar, guidance, penalties, watermark
from lamina.sampling.history import History, Processor
from lamina.sampling.kinds import Flag, Functions
from lamina.sampling.setting import Facts, ProcessorContext, Setting, Stage, register, registered_at


@dataclass(frozen=True)
class RemoveInvalid:
    """NaN becomes 0, and infinite scores the largest and smallest finite ones."""

    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "none"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return scores.nan_to_num(nan=0.0)


@dataclass(frozen=True)
class Renormalize:
    """Scores become log-probabilities."""

    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "none"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return scores.log_softmax(dim=-1).masked_fill(scores.isneginf(), -torch.inf)  # a row of -inf is unchanged


SETTINGS = (
    Setting(
        "remove_invalid_values", Flag(), default=False, stage=Stage.REPAIR,
        meaning="NaN and infinite scores become finite.",
        processor=lambda on, context: RemoveInvalid(),
    ),
    Setting(
        "renormalize_logits", Flag(), default=False, stage=Stage.FINAL,
        meaning="Scores become log-probabilities after all processors.",
        processor=lambda on, context: Renormalize(),
    ),
    Setting(
        "logits_processor", Functions("Processor"), default=(), group="scores",
        meaning="Your own processors, (scores [B, V], history) -> scores [B, V]; they run before the sampling filters.",
    ),
)  # fmt: skip

BEFORE_FILTERS = tuple(stage for stage in Stage if stage < Stage.FILTER)

for _part in (bans, penalties, forcing, grammar, filters, watermark, guidance):
    for _setting in _part.SETTINGS:
        register(_setting)
for _setting in SETTINGS:
    register(_setting)


def apply(scores: Tensor, history: History, chain: Iterable[Processor]) -> Tensor:
    """The scores after every processor in turn. [B, V]"""
    for processor in chain:
        scores = processor(scores, history)
    return scores


def need_tokens(chain: Iterable[Processor]) -> bool:
    """Whether any processor reads `history.tokens`; a callable that does not say counts as one that does."""
    return any(getattr(processor, "needs_tokens", True) for processor in chain)


def chain_of(settings: Any, facts: Facts) -> list[Processor]:
    """All processors that `settings` ask for, in order. `settings` has the attributes of `Settings`; None and values
    that are off ask for nothing."""
    return [*processors_of(settings, facts), *filters_of(settings, facts), *endings_of(settings, facts)]


def processors_of(settings: Any, facts: Facts) -> list[Processor]:
    """The processors before the filters, the caller's own included."""
    return add_own(_made(settings, facts, *BEFORE_FILTERS), settings.logits_processor or ())


def filters_of(settings: Any, facts: Facts) -> list[Processor]:
    """The sampling filters; none if `do_sample` is False."""
    return _made(settings, facts, Stage.FILTER) if settings.do_sample else []


def endings_of(settings: Any, facts: Facts) -> list[Processor]:
    """The processors after the filters, sampling or not."""
    return _made(settings, facts, Stage.FINAL)


def _made(settings: Any, facts: Facts, *stages: Stage) -> list[Processor]:
    """The processors of these stages, in order."""
    context = ProcessorContext(settings, facts)
    chain: list[Processor] = []
    for declared in registered_at(*stages):
        value = getattr(settings, declared.name)
        if declared.processor is not None and not declared.is_off(value):
            processor = declared.processor(value, context)
            chain += [] if processor is None else [processor]
    return chain


def add_own(chain: Sequence[Processor], own: Sequence[Processor]) -> list[Processor]:
    """The chain, then the caller's own processors; one that has the type of a member replaces that member."""
    places = {type(member): at for at, member in enumerate(chain)}
    merged, rest = list(chain), []
    for processor in own:
        if type(processor) in places:
            merged[places[type(processor)]] = processor
        else:
            rest.append(processor)
    return merged + rest
