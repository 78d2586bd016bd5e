"""Rows that nothing may follow.

Bans, grammars and callers' own processors give ids the score -inf. Where together they exclude every id, the best id of
the row is an excluded one, and instead of returning it generation raises an InputError that names them. What settings
alone decide is found before the run (`check_exclusions`). What depends on the tokens is found when it happens: plain
passes read the chosen tokens back anyway, and a captured step ends such a row on the device, before the id is fed.
Processors that cannot empty a row (`HARMLESS`) cost nothing: without any other, nobody looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling import bans, filters, forcing, penalties
from lamina.sampling.chain import RemoveInvalid, Renormalize
from lamina.sampling.grammar import Grammar
from lamina.sampling.history import Processor
from lamina.sampling.watermark import Watermark

if TYPE_CHECKING:
    from lamina.generation.settings.settings import Settings

HARMLESS = (
    filters.Filter, filters.Temperature, penalties.Repetition, penalties.SourceRepetition, penalties.Occurrence,
    penalties.LengthDecay, bans.SequenceBias, bans.MinLength, bans.MinNewTokens, forcing.ForcedFirst,
    forcing.ForcedLast, RemoveInvalid, Renormalize, Watermark,
)  # fmt: skip
NAMES = {
    bans.Suppress: "suppress_tokens", bans.SuppressAtBegin: "begin_suppress_tokens", bans.BadWords: "bad_words_ids",
    bans.NoRepeatNgram: "no_repeat_ngram_size", bans.NoSourceNgram: "encoder_no_repeat_ngram_size",
    bans.MinLength: "min_length", bans.MinNewTokens: "min_new_tokens", Grammar: "grammar",
    forcing.Allowed: "prefix_allowed_tokens_fn",
}  # fmt: skip
LEAST = torch.finfo(torch.float32).min
"""Scores up to this are of excluded ids: -inf, or what `remove_invalid_values` makes of it."""


def may_exclude_all(processors: Iterable[Processor]) -> bool:
    """Whether these processors could leave a row without any id.

    >>> may_exclude_all([filters.TopK(5), filters.Temperature(0.5)]), may_exclude_all([bans.NoRepeatNgram(2)])
    (False, True)
    """
    return any(isinstance(one, bans.BadWords) or not isinstance(one, HARMLESS) for one in processors)


def excluders(processors: Iterable[Processor]) -> list[Processor]:
    """Those that give ids the score -inf, whether or not they could do so to all."""
    return [one for one in processors if type(one) in NAMES or not isinstance(one, HARMLESS)]


def excluded(scores: Tensor, chosen: Tensor) -> Tensor:
    """Whether the chosen ids [B] are excluded by their scores [B, V]. -> [B] bool"""
    return scores.gather(1, chosen[:, None])[:, 0] <= LEAST


def nothing_left(processors: Iterable[Processor], row: int) -> InputError:
    """The error for a row in which no id is left."""
    names = [NAMES.get(type(one)) or f"logits_processor {_name(one)}" for one in excluders(processors)]
    return InputError(
        f"nothing may follow the tokens of row {row}: {_together(names)} every id. "
        "Let at least one id through, such as an end token"
    )


def check_exclusions(settings: Settings, vocab: int, least_new: int) -> None:
    """Refuses settings that leave a row nothing at some token, whatever its tokens are.

    least_new   new tokens that some row must get before it may end by eos
    """
    words = [
        word[0] for word in settings.bad_words_ids or () if len(word) == 1 and word[0] not in settings.eos_token_id
    ]
    never, first = settings.suppress_tokens or (), settings.begin_suppress_tokens or ()
    if len(never) + len(words) + len(first) + len(settings.eos_token_id) < vocab:
        return
    left = set(range(vocab)) - set(never) - set(words)
    names = [name for name, ids in (("suppress_tokens", never), ("bad_words_ids", words)) if ids]
    if not left:
        raise InputError(f"{_together(names)} all {vocab} ids: leave at least one")
    if least_new and left <= set(settings.eos_token_id):
        wanted = "min_length" if settings.min_new_tokens is None else "min_new_tokens"
        raise InputError(
            f"{_together(names)} every id but end tokens, and {wanted}={getattr(settings, wanted)} wants others first"
        )
    if left <= set(first):
        raise InputError(f"{_together([*names, 'begin_suppress_tokens'])} all {vocab} ids as the first new token")


def _together(names: list[str]) -> str:
    if len(names) < 2:
        return f"{''.join(names)} excludes"
    return f"{', '.join(names[:-1])} and {names[-1]} together exclude"


def _name(processor: Processor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
