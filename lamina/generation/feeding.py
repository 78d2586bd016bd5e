"""Feeding tokens to rows of a cache: one to each, or all of a sequence at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.step import Step

if TYPE_CHECKING:
    from lamina.model import Model


def feed_one(
    model: Model, cache: Cache, ids: Tensor, rows: Sequence[int] | None = None, hidden: Collection[int] = ()
) -> tuple[Tensor, Step]:
    """Feeds one token to each of these rows (all when None). ids [R] -> logits [R, V], and the step that was"""
    some = None if rows is None or len(rows) == cache.rows else rows
    return _fed(model, cache.step(1, rows=some), ids[:, None], hidden)


def feed_all(model: Model, cache: Cache, tokens: Sequence[Sequence[int]]) -> Cache:
    """Feeds each row its tokens, all in one pass."""
    counts = [len(row) for row in tokens]
    if not any(counts):
        return cache
    ids = torch.zeros(len(tokens), max(counts), dtype=torch.int64)
    for r, row in enumerate(tokens):
        ids[r, : len(row)] = torch.tensor(row)
    step = cache.step(ids.shape[1], None if min(counts) == max(counts) else counts)
    _fed(model, step, ids.to(cache.device))
    return cache


def _fed(model: Model, step: Step, ids: Tensor, hidden: Collection[int] = ()) -> tuple[Tensor, Step]:
    try:
        logits = model.forward(ids, step, logits="last", hidden=hidden)
    except BaseException:
        step.abort()
        raise
    step.commit()
    assert logits is not None
    return logits, step
