"""The same tokens as `one_by_one` through one captured step, replayed (see `lamina.runtime`).

The device decides which rows go on by their length and their last token, and the host looks at that late. Where the
host has a say of its own (stop strings, a listener), it looks after every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lamina.errors import CaptureError
from lamina.generation.run import Made, Run, one_by_one
from lamina.kernels.device_guard import current
from lamina.notices import notice
from lamina.runtime.eligibility import why_not_captured
from lamina.runtime.step import MOST_ENDS, CapturedStep
from lamina.sampling.chain import need_tokens

AHEAD = 8  # captured steps that are queued before the last ones are looked at


def why_not_replayed(run: Run) -> str | None:
    """Why tokens are made by plain passes; None where they need not be."""
    if reason := why_not_captured(run.model, run.cache):
        return reason
    if need_tokens(run.chooser.processors):
        names = [type(one).__name__ for one in run.chooser.processors if getattr(one, "needs_tokens", True)]
        return f"{', '.join(names)} reads the tokens so far, which a captured step does not know"
    if fickle := [type(one).__name__ for one in run.chooser.processors if type(one).__hash__ is None]:
        return f"{', '.join(fickle)} cannot be hashed, and a captured step is kept for what it does"
    if len(run.stopping.eos) > MOST_ENDS:
        return f"{len(run.stopping.eos)} ids end a row; a captured step knows up to {MOST_ENDS}"
    if run.guide is not None:
        return "guidance runs a second cache"
    if run.kept is not None:
        return "scores or log-probabilities are written down"
    return None


@torch.no_grad()
def replayed(run: Run) -> Made:
    """Greedy or sampled, through one captured step that is this run's alone. Where none is to be had, by plain passes,
    and `how` says why."""
    cache, start = run.cache, run.cache.clock.sync()
    history = run.history()
    numbers = torch.tensor(run.numbers, device=run.logits.device)
    scores = run.chooser.scores(run.logits, history)
    first = run.chooser.choose(scores, numbers, history.lengths)
    watched = run.told is not None or not run.stopping.on_device
    tokens = run.read(first, scores, range(run.rows)) if watched or run.chooser.may_exclude_all else []
    if watched:
        _tell(run, range(run.rows), tokens)  # before anybody waits for kernels
    try:
        with current(cache.device), run.model.graphs.step(cache.rows, run.chooser, cache) as step:
            step.begin(
                cache, first, run.stopping.most, run.stopping.eos,
                seed=run.chooser.seed, numbers=run.numbers, prompts=run.prompts,
            )  # fmt: skip
            step.capture()
            return _decoded(run, step, watched, start)
    except CaptureError as problem:  # raised before the first token is fed
        return plainly(run, str(problem), unexpected=True, first=first if watched else None)


def plainly(run: Run, reason: str, unexpected: bool = False, first: Tensor | None = None) -> Made:
    """By plain passes, and says why. first: the first tokens, where they are told already"""
    notice(f"decoding by plain passes, since {reason}", unexpected)
    made = one_by_one(run, first)
    made.how = f"plain passes, since {reason}"
    return made


def _decoded(run: Run, step: CapturedStep, watched: bool, start: list[int]) -> Made:
    """start: how many tokens each row held before"""
    cache, stopping = run.cache, run.stopping
    try:
        if watched:
            _watch(run, step)
        else:
            _run_ahead(step, max(stopping.most))
    finally:
        lengths = cache.clock.sync()
        if cache.pages is not None:
            cache.pages.shrink(lengths)  # pages are given a few steps ahead
    tokens = [row[a:b] for row, a, b in zip(cache.record.tolist(), start, lengths, strict=True)]
    for row, new in enumerate(tokens if not watched else ()):
        for token in new:
            stopping.put(row, token)
        if run.chooser.may_exclude_all and stopping.rows[row].reason is None:
            raise run.nothing_left(row)
    return Made(tokens, [reason or "" for reason in stopping.reasons], cache, "one captured graph a step")


def _tell(run: Run, rows: Iterable[int], tokens: Sequence[int]) -> None:
    """The next token of each of these rows (of `tokens`, which are of all rows): does it end, and who listens?"""
    for row in rows:
        reason = run.stopping.put(row, tokens[row])
        if run.told:
            run.told(row, tokens[row], reason)


def _watch(run: Run, step: CapturedStep) -> None:
    """Looks at every token: some rows end by what the host knows, or someone listens. The first tokens are told."""
    live = list(range(run.rows))
    while live:
        reasons = run.stopping.reasons
        for row in live:
            if reasons[row] in ("stop", "time"):
                step.remaining[row] = 1  # ends with the token that is fed next
        step.run(1, live)
        live = [row for row in live if reasons[row] is None]
        if not run.chooser.may_exclude_all:
            tokens = step.ids[:, 0].tolist()
        else:
            tokens, alive = torch.stack([step.ids[:, 0], step.counts]).tolist()
            if out := [row for row in live if not alive[row]]:
                raise run.nothing_left(out[0])
        _tell(run, live, tokens)


def _run_ahead(step: CapturedStep, most: int) -> None:
    """Queues steps, and looks late whether any row goes on."""
    flags, live = _Flags(step.counts), list(range(step.rows))
    for done in range(0, most, AHEAD):
        step.run(min(AHEAD, most - done), live)
        live = flags.left()
        if not live:
            break


class _Flags:
    """Which rows go on, as it was one look before: the device never waits for the host."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self.seen = torch.ones(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self.event = torch.cuda.Event() if counts.is_cuda else None
        self.looked = False

    def left(self) -> list[int]:
        if self.looked and self.event is not None:
            self.event.synchronize()
        left = [row for row, count in enumerate(self.seen.tolist()) if count]
        self.seen.copy_(self.counts, non_blocking=True)
        if self.event is not None:
            self.event.record()
        self.looked = True
        return left
