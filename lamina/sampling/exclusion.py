"""Rows without any id left to choose.

Bans, grammars and callers' own processors give ids the score -inf. If together they exclude every id, generation raises
an InputError that names them instead of returning an excluded id. Settings that always exclude everything are refused
before the run (`check_exclusions`). Other cases depend on the tokens and are found as they occur: plain passes check
the chosen tokens when they read them back, and a captured step ends such a row on the device before the id is fed.

Each processor class says in `excludes` which ids of a row it may exclude: "none", "some" or "all". Only with an "all"
among them is anything checked. A callable without `excludes` counts as "all".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling.history import Processor

if TYPE_CHECKING:
    from lamina.generation.settings.settings import Settings

LEAST = torch.finfo(torch.float32).min
"""Ids with at most this score are excluded: -inf, and the value by which `remove_invalid_values` replaces -inf."""


def may_exclude_all(processors: Iterable[Processor]) -> bool:
    """Whether these processors could leave a row without any id.

    >>> from lamina.sampling import bans, filters
    >>> may_exclude_all([filters.TopK(5), filters.Temperature(0.5)]), may_exclude_all([bans.NoRepeatNgram(2)])
    (False, True)
    """
    return any(_excludes(one) == "all" for one in processors)


def excluders(processors: Iterable[Processor]) -> list[Processor]:
    """The processors that exclude some ids or all."""
    return [one for one in processors if _excludes(one) != "none"]


def excluded(scores: Tensor, chosen: Tensor) -> Tensor:
    """Whether the chosen ids [B] are excluded by their scores [B, V]. -> [B] bool"""
    return scores.gather(1, chosen[:, None])[:, 0] <= LEAST


def nothing_left(processors: Iterable[Processor], row: int) -> InputError:
    """The error for a row without any id left."""
    names = [getattr(one, "setting", None) or f"logits_processor {_name(one)}" for one in excluders(processors)]
    return InputError(
        f"nothing may follow the tokens of row {row}: {_together(names)} every id. "
        "Let at least one id through, such as an end token"
    )


def check_exclusions(settings: Settings, vocab: int, least_new: int) -> None:
    """Refuses settings that leave a row without any id at some token, whatever its tokens are.

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


def _excludes(processor: Processor) -> str:
    return getattr(processor, "excludes", "all")


def _together(names: list[str]) -> str:
    if len(names) < 2:
        return f"{''.join(names)} excludes"
    return f"{', '.join(names[:-1])} and {names[-1]} together exclude"


def _name(processor: Processor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
