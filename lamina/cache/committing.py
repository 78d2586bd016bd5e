"""Committing a pass: each row's accepted tokens are taken in by every layer, and then the clock moves.

Lines have them in their slots already. What a layer could not write before it knew how many are accepted (rings,
convolutions, recurrent states) it has left with the step, and takes in now. With the tokens go their ids and the logits
after the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.counts import Counts, Numbers
from lamina.cache.fetching import is_far
from lamina.cache.step import Step

if TYPE_CHECKING:
    from lamina.cache.cache import Cache


def commit(cache: Cache, step: Step, accepted: Numbers | None) -> None:
    """See `Step.commit`."""
    counts, slack, clock = step._counts_high or [], cache.slack, cache.clock
    if accepted is None:
        taken, high = step.all_counts, counts
        low = counts if step.counts is None or step.counts_exact else [0] * len(counts)
    else:
        given = Counts.of(accepted, len(counts), counts, cache.device, "accepted", step.counts)
        if given.out_of_range is not None:
            clock.doubt(given.out_of_range)
        if step.fetched is not None:
            step.fetched.taken = given.read()
        taken, low, high = given.tensor, given.low, given.high
    numbers = list(range(cache.rows)) if step.rows is None else step.rows
    if cache.pages is not None and step.T > 1:
        cache.pages.take_rings(clock, numbers, high)
    after = [(row, clock.low[row] + a, clock.high[row] + b) for row, a, b in zip(numbers, low, high, strict=True)]
    step.folds = slack > 0 and any(most - clock.base_low[row] > 2 * slack for row, _, most in after)

    for (i, name), left in step._left.items():
        layer = cache.layers[i][name]
        if step.fetched is not None and is_far(layer):
            layer.commit_far(step.fetched, step, left, taken)
        else:
            layer.commit(step, left, taken)

    base = step.base_after(taken) if slack else step.before + taken
    step.put(clock.base, base)
    for row, least, most in after:
        certain = least == most and most - clock.base_low[row] > 2 * slack
        clock.base_low[row] = most - slack if certain else max(clock.base_low[row], least - 2 * slack)
    _keep_tokens(cache, step)
    _keep_logits(cache, step, taken)
    clock.advance(numbers, None if step.rows is None else step.row_index, taken, low, high)


def _keep_tokens(cache: Cache, step: Step) -> None:
    ids = step.ids if step.ids is not None else torch.full_like(step.positions, -1)
    if step.start is not None:
        step.take(cache.record)[:, step.start : step.start + step.T] = ids
        return
    places = step.before[:, None] + torch.arange(step.T, device=cache.device)  # padding's lie past the row's end
    cache.record[step.row_index[:, None], places] = ids.to(cache.record)


def _keep_logits(cache: Cache, step: Step, taken: Tensor) -> None:
    logits = step.logits
    if logits is None:
        if cache.logits is not None:
            known = step.take(cache.logits)
            step.put(cache.logits, known.masked_fill((taken > 0)[:, None], float("nan")))
        return
    kept = cache.logits_kept(logits.shape[-1], logits.dtype)
    if logits.dim() == 3:
        last = (taken - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[-1])
        logits = logits.gather(1, last)[:, 0]
    elif taken is not step.all_counts:
        logits = logits.masked_fill((taken != step.all_counts)[:, None], float("nan"))
    step.put(kept, torch.where((taken > 0)[:, None], logits, step.take(kept)))
