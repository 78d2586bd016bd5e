"""Committing a pass: each row's accepted tokens are stored by every layer, and then the clock moves.

Lines have them in their slots already. What a layer could not write before it knew how many are accepted (rings,
convolutions, recurrent states) it has left with the step, and writes now. With the tokens go their ids and the logits
after the last of them. All of it is one `Change`: an interrupt leaves the cache before the pass or after it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.counts import Counts, Numbers
from lamina.cache.layers.base import Layer
from lamina.cache.ops.journal import Change
from lamina.cache.step import Step
from lamina.cache.storage.prefetch import on_host
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache


def commit(cache: Cache, step: Step, accepted: Numbers | None) -> None:
    """See `Step.commit`."""
    _check_ran(cache, step)
    counts, slack, clock = step._counts_high or [], cache.slack, cache.clock
    if accepted is None:
        taken, high = step.all_counts, counts
        low = counts if step.counts is None or step.counts_exact else [0] * len(counts)
        if step.fetched is not None:
            step.fetched.taken = counts
    else:
        given = Counts.of(accepted, len(counts), counts, cache.device, "accepted", step.counts)
        if given.out_of_range is not None:
            clock.doubt(given.out_of_range)
        if step.fetched is not None:
            step.fetched.taken = given.read()
        taken, low, high = given.tensor, given.low, given.high
    numbers = list(range(cache.rows)) if step.rows is None else step.rows
    if cache.pages is not None and step.T > 1:
        cache.pages.prepare_rings(clock, numbers, high)
    least = [clock.low[row] + n for row, n in zip(numbers, low, strict=True)]
    most = [clock.high[row] + n for row, n in zip(numbers, high, strict=True)]
    bases = [clock.base_low[row] for row in numbers]
    step.folds = slack > 0 and any(end - base > 2 * slack for end, base in zip(most, bases, strict=True))
    bases = [_base_low(*ends, slack) for ends in zip(bases, least, most, strict=True)]
    after = step.after if taken is step.all_counts else step.before + taken

    def publish() -> None:
        step.put(clock.base, step.base_after(taken) if slack else after)
        for row, base in zip(numbers, bases, strict=True):
            clock.base_low[row] = base
        _keep_tokens(cache, step)
        _keep_logits(cache, step, taken)
        clock.move(numbers, None if step.rows is None else step.row_index, after, least, most)

    change = Change()
    for (i, name), left in step._left.items():
        _add(change, cache.layers[i][name], step, left, taken)
    change.write(publish)
    step.closed = True  # before the change is noted: a pass is never committed twice
    cache.carry_out(change)


def _add(change: Change, layer: Layer, step: Step, left: Any, taken: Tensor) -> None:
    """What a layer computes and writes."""
    far = step.fetched
    if far is not None and on_host(layer):
        write = partial(layer.commit_far, far, step)
        change.add(partial(layer.fold_far, far, step, left, taken), lambda folded: write(folded, taken))
    else:
        change.add(partial(layer.fold, step, left, taken), lambda folded: layer.commit(step, folded, taken))


def _base_low(base: int, least: int, most: int, slack: int) -> int:
    """The host's lower bound on a row's base after commit."""
    certain = least == most and most - base > 2 * slack
    return most - slack if certain else max(base, least - 2 * slack)


def _check_ran(cache: Cache, step: Step) -> None:
    """Refuses a pass that has not run through the model: it would advance over slots that nobody wrote."""
    if step.ran:
        return
    missing = [
        f"{i} ({name!r})"
        for i, entry in enumerate(cache.layers)
        for name, layer in entry.items()
        if layer.by_pass and (i, name) not in step.written
    ]
    if missing:
        shown = ", ".join(missing[:4]) + (" …" if len(missing) > 4 else "")
        raise InputError(
            f"this step cannot be committed: nothing was written in layer {shown}. Run model.forward(ids, step) first, "
            "or drop the step with step.abort()"
        )


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
        if cache._logits is not None:
            known = step.take(cache._logits)
            step.put(cache._logits, known.masked_fill((taken > 0)[:, None], float("nan")))
        return
    kept = cache.logits_kept(logits.shape[-1], logits.dtype)
    if logits.dim() == 3:
        last = (taken - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[-1])
        logits = logits.gather(1, last)[:, 0]
    elif taken is not step.all_counts:
        logits = logits.masked_fill((taken != step.all_counts)[:, None], float("nan"))
    step.put(kept, torch.where((taken > 0)[:, None], logits, step.take(kept)))
