"""Forced tokens: a given first or last token, and a function that lists the allowed ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling.bans import check_id, mask_of
from lamina.sampling.history import History
from lamina.sampling.kinds import Function, TokenId, TokenIds
from lamina.sampling.setting import ProcessorContext, Setting, Stage, id_list

NEW_TOKENS = 20
"""New tokens of a row if neither max_new_tokens nor max_length is given."""


@dataclass(frozen=True)
class ForcedFirst:
    """Forces this id after a row's first token, which is the start token of a decoder."""

    id: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "none"  # the forced id stays

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return force(scores, history.lengths == 1, self.id)


@dataclass(frozen=True)
class ForcedLast:
    """Forces one of these ids as the token with which a row reaches `most` new tokens (`new`), or `most` tokens
    including its prompt."""

    ids: Tensor  # [V] bool
    most: int
    new: bool = True
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "none"  # a forced id stays

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        held = history.lengths - history.prompts if self.new else history.lengths
        return force(scores, held == self.most - 1, self.ids)


def force(scores: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """In rows [B] bool, ids [V] bool get the score 0 and all others -inf."""
    return torch.where(rows[:, None], torch.where(ids, 0.0, -torch.inf), scores)


@dataclass(frozen=True)
class Allowed:
    """Allows the ids that `function(row, tokens)` lists, and no others; tokens [length] are all tokens of the row.
    Beams of one prompt are adjacent rows, and the function gets the prompt's number. It runs on the host, so the device
    waits for it at every token."""

    function: Callable[[int, Tensor], Iterable[int]]
    beams: int = 1
    needs_tokens: ClassVar[bool] = True
    excludes: ClassVar[str] = "all"
    setting: ClassVar[str] = "prefix_allowed_tokens_fn"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        ids = history.ids
        allowed = torch.zeros(scores.shape, dtype=torch.bool)
        for at, (number, length) in enumerate(zip(history.numbers(), history.lengths.tolist(), strict=True)):
            given = self.function(number // self.beams, ids[at, :length])
            try:
                listed = [int(id) for id in given]
            except (TypeError, ValueError) as error:
                raise InputError(f"prefix_allowed_tokens_fn must return a list of ids, not {given!r}") from error
            if not listed:
                raise InputError(
                    f"prefix_allowed_tokens_fn lists nothing for prompt {number // self.beams} after {length} tokens: "
                    "it must allow at least one id, an end token where the row is to end"
                )
            allowed[at, [check_id(id, scores.shape[-1], "the list of prefix_allowed_tokens_fn") for id in listed]] = (
                True
            )
        return allow_only(scores, allowed.to(scores.device), self.beams)


def allow_only(scores: Tensor, allowed: Tensor, beams: int = 1) -> Tensor:
    """Bans all ids but the allowed ones ([B, V] or [V] bool). If earlier processors banned every allowed id, in all
    beams of a prompt, the allowed ids get the score 0: this overrides those bans.

    >>> allow_only(torch.tensor([[1.0, 2.0, 3.0], [1.0, -torch.inf, 3.0]]), torch.tensor([False, True, False]))
    tensor([[-inf, 2., -inf],
            [-inf, 0., -inf]])
    """
    left = torch.where(allowed, scores, -torch.inf)
    stuck = left.amax(dim=-1).isneginf().view(-1, beams).all(dim=-1).repeat_interleave(beams)
    return torch.where(stuck[:, None], torch.where(allowed, 0.0, -torch.inf), left)


def _forced_first(id: int, context: ProcessorContext) -> ForcedFirst:
    return ForcedFirst(mask_of([id], context.vocab, context.device, "forced_bos_token_id"))


def _forced_last(ids: int | Iterable[int], context: ProcessorContext) -> ForcedLast:
    """If both lengths are given, max_new_tokens counts."""
    mask = mask_of(id_list(ids), context.vocab, context.device, "forced_eos_token_id")
    most_new, most = context.settings.max_new_tokens, context.settings.max_length
    if most_new is None and most is not None:
        return ForcedLast(mask, most, new=False)
    return ForcedLast(mask, most_new or NEW_TOKENS)


SETTINGS = (
    Setting(
        "prefix_allowed_tokens_fn",
        Function("(row, tokens) -> ids", "Callable[[int, Tensor], Sequence[int]]"), default=None, stage=Stage.ALLOW,
        meaning="(row, tokens) -> the ids that may come next.",
        processor=lambda function, context: Allowed(function, context.beams),
    ),
    Setting(
        "forced_bos_token_id", TokenId(), default=None, stage=Stage.FORCE, processor=_forced_first,
        meaning="The first new token after a decoder's start token.",
    ),
    Setting(
        "forced_eos_token_id", TokenIds(), default=None, stage=Stage.FORCE, processor=_forced_last,
        meaning="The last token of a row that reaches its maximum length; one of these ids.",
    ),
)  # fmt: skip
