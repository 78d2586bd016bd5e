"""What strategies share that make one token after the other: taking tokens up, and feeding them to rows of a cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.step import Step

if TYPE_CHECKING:
    from lamina.generation.run import Run
    from lamina.model import Model


def spread(run: Run, cache: Cache, rows: Sequence[int], times: int) -> Run:
    """The run over a cache in which each of these rows stands `times` times, side by side."""
    each = [row for row in rows for _ in range(times)]
    return replace(
        run,
        cache=cache,
        prompts=[run.prompts[row] for row in each],
        numbers=[run.numbers[row] for row in each],
        source=None if run.source is None else run.source[each],
    )


def take(
    run: Run, live: Sequence[int], chosen: Sequence[int], tokens: list[list[int]], reasons: list[str]
) -> list[int]:
    """Adds the chosen token of each live row to `tokens`, and why the row ends, if it does, to `reasons`. -> which of
    the live rows go on, as indices into `live`"""
    going = []
    for at, (row, token) in enumerate(zip(live, chosen, strict=True)):
        tokens[row].append(token)
        reason = run.stopping.put(row, token)
        if reason is None:
            going.append(at)
        else:
            reasons[row] = reason
        if run.told:
            run.told(row, token, reason)
    return going


def feed_one(
    model: Model, cache: Cache, ids: Tensor, rows: Sequence[int] | None = None, hidden: Collection[int] = ()
) -> tuple[Tensor, Step]:
    """Feeds one token to each of these rows (all when None). ids [R] -> logits [R, V], and the step that was"""
    some = None if rows is None or len(rows) == cache.rows else rows
    return _fed(model, cache.step(1, rows=some), ids[:, None], hidden)


def feed_all(model: Model, cache: Cache, tokens: Sequence[Sequence[int]]) -> Cache:
    """Feeds each row its tokens, all in one pass."""
    counts = [len(row) for row in tokens]
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
