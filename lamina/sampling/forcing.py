"""Rows that may go on in a few ways only: a forced first or last token, and a function that lists what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling.bans import inside
from lamina.sampling.history import History

NEW_TOKENS = 20
"""How many tokens are made if neither max_new_tokens nor max_length is given."""


@dataclass(frozen=True)
class ForcedFirst:
    """A row of one token goes on with this id: the first that a decoder makes after its start token."""

    id: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return forced(scores, history.lengths == 1, self.id)


@dataclass(frozen=True)
class ForcedLast:
    """The last token that a row may make is one of these: the one with which it holds `most` tokens, or `most` new
    ones."""

    ids: Tensor  # [V] bool
    most: int
    new: bool = True
    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        held = history.lengths - history.prompts if self.new else history.lengths
        return forced(scores, held == self.most - 1, self.ids)


def forced(scores: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """In these rows [B] the ids [V] have the score 0 and all others -inf."""
    return torch.where(rows[:, None], torch.where(ids, 0.0, -torch.inf), scores)


@dataclass(frozen=True)
class Allowed:
    """What `function(row, tokens)` lists for a row, and nothing else; tokens [length] is all that the row holds. The
    rows of one prompt's beams stand side by side and are given their prompt's number. The host runs the function, so
    the device waits for it at every token."""

    function: Callable[[int, Tensor], Iterable[int]]
    beams: int = 1
    needs_tokens: ClassVar[bool] = True

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        ids = history.ids
        allowed = torch.zeros(scores.shape, dtype=torch.bool)
        for at, (number, length) in enumerate(zip(history.numbers(), history.lengths.tolist(), strict=True)):
            listed = [int(id) for id in self.function(number // self.beams, ids[at, :length])]
            if not listed:
                raise InputError(
                    f"prefix_allowed_tokens_fn lists nothing for prompt {number // self.beams} after {length} tokens: "
                    "it must allow at least one id, an end token where the row is to end"
                )
            allowed[at, [inside(id, scores.shape[-1], "what prefix_allowed_tokens_fn lists") for id in listed]] = True
        return only(scores, allowed.to(scores.device), self.beams)


def only(scores: Tensor, allowed: Tensor, beams: int = 1) -> Tensor:
    """Bans all but the allowed [B, V]. Where other processors have banned every one of those, in all of a prompt's
    beams, they get the score 0: what is allowed here has the last word.

    >>> only(torch.tensor([[1.0, 2.0, 3.0], [1.0, -torch.inf, 3.0]]), torch.tensor([False, True, False]))
    tensor([[-inf, 2., -inf],
            [-inf, 0., -inf]])
    """
    left = torch.where(allowed, scores, -torch.inf)
    stuck = left.amax(dim=-1).isneginf().view(-1, beams).all(dim=-1).repeat_interleave(beams)
    return torch.where(stuck[:, None], torch.where(allowed, 0.0, -torch.inf), left)
