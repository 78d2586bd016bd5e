"""The same tokens as `one_by_one` through one captured step, replayed (see `lamina.runtime`).

The device decides which rows go on by their length and their last token, and the host looks at that late. Where the
host has a say of its own (stop strings, a listener), it looks after every token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.generation.processors import need_tokens
from lamina.generation.run import Made, Run
from lamina.runtime.capture import MOST_ENDS, CapturedStep
from lamina.runtime.explain import why_not_captured

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
    """Greedy or sampled, through one captured step."""
    cache, start, stopping = run.cache, run.cache.clock.sync(), run.stopping
    history = run.history()
    numbers = torch.tensor(run.numbers, device=run.logits.device)
    first = run.chooser.choose(run.chooser.scores(run.logits, history), numbers, history.lengths)
    step = run.model.graphs.step(cache.rows, run.chooser, cache)
    step.take_up(
        cache, first, stopping.most, stopping.eos, seed=run.chooser.seed, numbers=run.numbers, prompts=run.prompts
    )
    watched = run.told is not None or not stopping.on_device
    try:
        if watched:
            _watch(run, step, first.tolist())
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
    return Made(tokens, [reason or "" for reason in stopping.reasons], cache, "one captured graph a step")


def _watch(run: Run, step: CapturedStep, current: list[int]) -> None:
    """Looks at every token: some rows end by what the host knows, or someone listens. current: each row's first"""
    live = list(range(run.rows))
    while live:
        reasons = {row: run.stopping.put(row, current[row]) for row in live}
        for row, reason in reasons.items():
            if reason in ("stop", "time"):
                step.left[row] = 1  # ends with the token that is fed next
            if run.told:
                run.told(row, current[row], reason)
        step.run(1, live)
        live = [row for row, reason in reasons.items() if reason is None]
        current = step.ids[:, 0].tolist()


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
