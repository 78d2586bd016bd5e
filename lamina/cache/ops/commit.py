"""Commit: how the tokens of a pass become part of a cache, whoever ran the pass.

    host      `accepted_counts`: how many tokens of each row, checked; pages for rings; bounds on the new lengths
    layers    what a layer could not write before (rings, convolutions, recurrent states); lines have theirs already
    record    the ids of the tokens
    logits    those after each row's last accepted token
    clock     `base`, `written` and the lengths, last

`commit` does all of it for a `Step`, with PyTorch operations, as one `Change`: an interrupt leaves the cache before the
pass or after it. A captured pass does layers to clock in a CUDA graph (`lamina.kernels.step_ends` has the kernels), and
the host's half around its launch is `on_device`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


def accepted_counts(
    cache: Cache, rows: Sequence[int], given: Counts, accepted: Numbers | None, *, rings: bool
) -> Counts:
    """How many tokens of each of these rows are stored: `accepted`, or all that were given when None.

    rings   True if rings are written at commit: they get pages again, since pages may have been shared in between
    """
    taken = given
    if accepted is not None:
        taken = Counts.of(accepted, len(rows), given.high, cache.device, "accepted", given.tensor)
        if taken.out_of_range is not None:
            cache.clock.doubt(taken.out_of_range)
        if cache.fetcher is not None:
            taken.read()
    if cache.pages is not None and rings:
        cache.pages.prepare_rings(cache.clock, rows, taken.high)
    return taken


@contextmanager
def on_device(cache: Cache, low: Sequence[int], high: int | Sequence[int]) -> Iterator[None]:
    """Around the launches that commit on the device: each row goes on by `low` to `high` tokens.

        with on_device(cache, taken.low, taken.high):
            graph.replay()

    An admitted pass is over from here on, so it cannot be committed twice. The host's bounds on the lengths hold
    before, inside and after, also if an interrupt comes.
    """
    one = cache._release_open_pass()
    cache.clock.drift(high)
    yield
    cache.clock.drifted(low)
    if one is not None:
        one.close()


def commit(cache: Cache, step: Step, accepted: Numbers | None) -> None:
    """See `Step.commit`."""
    _check_ran(cache, step)
    slack, clock = cache.slack, cache.clock
    numbers = list(range(cache.rows)) if step.rows is None else step.rows
    counts = accepted_counts(cache, numbers, step.given, accepted, rings=step.T > 1)
    if step.fetched is not None:
        step.fetched.taken = counts.high
    taken, whole = counts.tensor, accepted is None
    least = [clock.low[row] + n for row, n in zip(numbers, counts.low, strict=True)]
    most = [clock.high[row] + n for row, n in zip(numbers, counts.high, strict=True)]
    bases = [clock.base_low[row] for row in numbers]
    step.folds = slack > 0 and any(end - base > 2 * slack for end, base in zip(most, bases, strict=True))
    bases = [_base_low(*ends, slack) for ends in zip(bases, least, most, strict=True)]
    after = step.after if whole else step.before + taken

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
    """Adds what a layer computes and writes."""
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
    kept = cache._kept_logits(logits.shape[-1], logits.dtype)
    if logits.dim() == 3:
        last = (taken - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[-1])
        logits = logits.gather(1, last)[:, 0]
    elif taken is not step.all_counts:
        logits = logits.masked_fill((taken != step.all_counts)[:, None], float("nan"))
    step.put(kept, torch.where((taken > 0)[:, None], logits, step.take(kept)))
