"""Prompts in any form become ragged rows: ids padded on the right, and how many of them are real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.model import Model


@dataclass(frozen=True)
class Prompt:
    """ids [B, T], real ones first in each row, and their number `counts`."""

    ids: Tensor
    counts: list[int]

    @property
    def rows(self) -> list[list[int]]:
        return [row[:count].tolist() for row, count in zip(self.ids, self.counts, strict=True)]


def from_rows(rows: Sequence[Sequence[int]]) -> Prompt:
    """Id lists of different lengths.

    >>> from_rows([[5, 6], [7]]).ids.tolist()
    [[5, 6], [7, 0]]
    """
    if not rows:
        raise InputError("there are no prompts")
    for r, row in enumerate(rows):
        if len(row) == 0:
            raise InputError(f"prompt {r} is empty: give at least one token")
    counts = [len(row) for row in rows]
    ids = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    for r, row in enumerate(rows):
        ids[r, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
    return Prompt(ids, counts)


def ragged(ids: Tensor, attention_mask: Tensor | None = None) -> Prompt:
    """A tensor padded on the left or the right, with its mask (1 = real).

    >>> ragged(torch.tensor([[0, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]])).rows
    [[5], [6, 7]]
    """
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2:
        raise InputError(f"prompt ids must be [B, T] or [T], not {list(ids.shape)}")
    if attention_mask is None:
        return from_rows(ids.tolist())
    if attention_mask.shape != ids.shape:
        raise InputError(f"attention_mask is {list(attention_mask.shape)}, the ids are {list(ids.shape)}")
    rows = []
    for r, (row, mask) in enumerate(zip(ids.cpu(), attention_mask.cpu().bool(), strict=True)):
        real = mask.nonzero()[:, 0]
        if len(real) and int(real[-1] - real[0]) + 1 != len(real):
            raise InputError(f"the attention_mask of row {r} has a gap: padding belongs on the left or the right")
        rows.append(row[mask].tolist())
    return from_rows(rows)


def prompt_of(model: Model, prompts: Any, attention_mask: Tensor | None = None) -> Prompt:
    """Text, texts, id lists or a tensor."""
    if isinstance(prompts, Tensor):
        return ragged(prompts, attention_mask)
    if attention_mask is not None:
        raise InputError("an attention_mask belongs to a tensor of ids; lists of ids and texts need none")
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise InputError(f"prompts must be text, a list of texts, a list of id lists or a tensor, not {prompts!r}")
    if isinstance(prompts[0], int):
        prompts = [prompts]
    if isinstance(prompts[0], str):
        if model.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer: give lists of ids instead of text")
        prompts = [model.tokenizer.encode(text) for text in prompts]
    return from_rows(prompts)
