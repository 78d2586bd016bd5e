"""Commit: stores the accepted tokens of a pass in the cache, for plain and for captured passes.

    host      `accepted_counts` checks how many tokens of each row are stored, and gets pages for rings
    layers    write what they could not write during the pass (rings, convolutions, recurrent states); lines are written
    record    the ids of the tokens
    logits    those after each row's last accepted token
    clock     `base` and `written`, and the lengths last

`commit` does all of this for a `Step` with PyTorch operations, as one `Change`: after an interrupt the cache is as
before the commit or as after it. A captured pass does everything from layers to clock in a CUDA graph (the kernels are
in `lamina.kernels.step_ends`), and `device_commit` is the host's part around the launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.counts import Counts, CountsLike
from lamina.cache.layers.base import Layer
from lamina.cache.ops.journal import Change
from lamina.cache.step import Step
from lamina.cache.storage.prefetch import on_host
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.cache.cache import Cache


def accepted_counts(
    cache: Cache, rows: Sequence[int], given: Counts, accepted: CountsLike | None, *, rings: bool
) -> Counts:
    """Checks how many tokens of each of these rows are stored: `accepted`, or all that were given when None.

    rings   True if rings are written at commit. Their pages are prepared again, since a fork during the pass may have
            made them shared
    """
    taken = given
    if accepted is not None:
        taken = Counts.of(accepted, len(rows), given.high, cache.device, "accepted", given.tensor)
        if taken.out_of_range is not None:
            cache.clock.note_out_of_range(taken.out_of_range)
        if cache.fetcher is not None:
            taken.read()
    if cache.pages is not None and rings:
        cache.pages.prepare_rings(cache.clock, rows, taken.high)
    return taken


@contextmanager
def device_commit(cache: Cache, low: Sequence[int], high: int | Sequence[int]) -> Iterator[None]:
    """Wraps the launches that commit on the device, which advance each row by `low` to `high` tokens.

        with device_commit(cache, taken.low, taken.high):
            graph.replay()

    The open pass is released first, so it cannot be committed twice. The host's bounds on the lengths hold before,
    inside and after the block, also if an interrupt comes.
    """
    one = cache._release_open_pass()
    cache.clock.expect_advance(high)
    yield
    cache.clock.confirm_advance(low, cache.slack)
    if one is not None:
        one.close()


def commit(cache: Cache, step: Step, accepted: CountsLike | None) -> None:
    """See `Step.commit`."""
    _check_ran(cache, step)
    slack, clock = cache.slack, cache.clock
    rows = list(range(cache.rows)) if step.rows is None else step.rows
    counts = accepted_counts(cache, rows, step.given, accepted, rings=step.T > 1)
    if step.staged is not None:
        step.staged.taken = counts.high
    taken, whole = counts.tensor, accepted is None
    least = [clock.low[row] + n for row, n in zip(rows, counts.low, strict=True)]
    most = [clock.high[row] + n for row, n in zip(rows, counts.high, strict=True)]
    bases = [clock.base_low[row] for row in rows]
    step.moves_base = slack > 0 and any(end - base > 2 * slack for end, base in zip(most, bases, strict=True))
    bases = [_base_low(*ends, slack) for ends in zip(bases, least, most, strict=True)]
    after = step.after if whole else step.before + taken

    def publish() -> None:
        step.put(clock.base, step.base_after(taken) if slack else after)
        for row, base in zip(rows, bases, strict=True):
            clock.base_low[row] = base
        _store_ids(cache, step)
        _store_logits(cache, step, taken)
        clock.move(rows, None if step.rows is None else step.row_index, after, least, most)

    change = Change()
    for (i, name), pending in step._pending.items():
        _add_layer(change, cache.layers[i][name], step, pending, taken)
    change.write(publish)
    step.closed = True  # before the change is noted: a pass is never committed twice
    cache.carry_out(change)


def commit_exported(cache: Cache, step: Step) -> None:
    """Commit inside an exported program: stores all given tokens with PyTorch operations alone. The host of the program
    keeps the ids and the logits."""
    clock, taken = cache.clock, step.all_counts
    layers = [(cache.layers[i][name], pending) for (i, name), pending in step._pending.items()]
    for layer, folded in [(layer, layer.fold(step, pending, taken)) for layer, pending in layers]:
        layer.commit(step, folded, taken)
    # A tensor of its own for each: a program whose buffers end as one and the same value has no signature.
    clock.base.copy_(step.base_after(taken) if cache.slack else step.after.clone())
    clock.lengths.copy_(step.after)
    clock.written.copy_(torch.maximum(clock.written, step.after))


def _add_layer(change: Change, layer: Layer, step: Step, pending: Any, taken: Tensor) -> None:
    """Adds what a layer computes (`fold`) and writes (`commit`) to the change."""
    staged = step.staged
    if staged is not None and on_host(layer):
        write = partial(layer.commit_to_host, staged, step)
        change.add(partial(layer.fold_from_host, staged, step, pending, taken), lambda folded: write(folded, taken))
    else:
        change.add(partial(layer.fold, step, pending, taken), lambda folded: layer.commit(step, folded, taken))


def _base_low(base: int, least: int, most: int, slack: int) -> int:
    """The host's lower bound on a row's base after commit."""
    certain = least == most and most - base > 2 * slack
    return most - slack if certain else max(base, least - 2 * slack)


def _check_ran(cache: Cache, step: Step) -> None:
    """Refuses a pass that has not run through every layer: the row would advance over slots that were not written."""
    if step.ran:
        return
    missing = [
        f"{i} ({name!r})"
        for i, entry in enumerate(cache.layers)
        for name, layer in entry.items()
        if layer.written_by_pass and (i, name) not in step.written
    ]
    if missing:
        shown = ", ".join(missing[:4]) + (" …" if len(missing) > 4 else "")
        raise InputError(
            f"this step cannot be committed: nothing was written in layer {shown}. Run model.forward(ids, step) first, "
            "or drop the step with step.abort()"
        )


def _store_ids(cache: Cache, step: Step) -> None:
    ids = step.ids if step.ids is not None else torch.full_like(step.positions, -1)
    if step.start is not None:
        step.take(cache.record)[:, step.start : step.start + step.T] = ids
        return
    positions = step.before[:, None] + torch.arange(step.T, device=cache.device)  # padding's are past the row's end
    cache.record[step.row_index[:, None], positions] = ids.to(cache.record)


def _store_logits(cache: Cache, step: Step, taken: Tensor) -> None:
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
