"""The captured strategy: the tokens of `decode_plain`, by replaying one captured decode step (see `lamina.runtime`).

The step itself decides on the device which rows go on, by their length and their last token. The host queues several
steps and reads the live rows one round late, so the device never waits. If the host must see every token (stop strings,
a time limit, a stream), it reads after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.errors import CaptureError
from lamina.generation.run import Run, StrategyOutput
from lamina.generation.strategies.plain import decode_plain
from lamina.kernels.device_guard import current
from lamina.runtime.eligibility import why_no_step, why_not_captured
from lamina.runtime.step import MOST_ENDS, CapturedStep
from lamina.sampling.chain import need_tokens

AHEAD = 8  # captured steps queued in one round, before the live rows are read


def why_plain(run: Run) -> str | None:
    """Why this run must decode by plain passes; None if a captured step can."""
    if (reason := why_not_captured(run.model, run.cache)) and (reason := why_no_step(run.model, run.cache, reason)):
        return reason
    if need_tokens(run.chooser.processors):
        names = [type(one).__name__ for one in run.chooser.processors if getattr(one, "needs_tokens", True)]
        return f"{', '.join(names)} reads the tokens so far, which a captured step does not have"
    if run.source_ids is not None:
        for one in run.chooser.processors:
            if getattr(one, "needs_source", False):
                return f"{type(one).__name__} reads the source's ids, which a captured step does not have"
    if unhashable := [type(one).__name__ for one in run.chooser.processors if type(one).__hash__ is None]:
        return f"{', '.join(unhashable)} cannot be hashed, and captured steps are looked up by their processors"
    if len(run.stopping.eos) > MOST_ENDS:
        return f"{len(run.stopping.eos)} ids end a row, and a captured step compares up to {MOST_ENDS}"
    if run.guide is not None:
        return "guidance runs a second cache"
    if run.recorder is not None:
        return "logits, scores or log-probabilities are recorded"
    return None


@torch.no_grad()
def decode_captured(run: Run, *, native: bool = False) -> StrategyOutput:
    """Greedy or sampled decoding by a captured step that this run borrows. If no step can be borrowed or captured, the
    run decodes by plain passes and `how` says why."""
    cache, start = run.cache, run.cache.clock.sync()
    history = run.history()
    row_ids = on_device(run.row_ids, run.logits.device)  # the prompt's graph still runs: nothing here waits for it
    scores = run.chooser.scores(run.logits, history)
    first = run.chooser.choose(scores, row_ids, history.lengths)
    watched = run.on_token is not None or not run.stopping.on_device
    tokens = run.to_host(first, scores, range(run.rows)) if watched or run.chooser.may_exclude_all else []
    if watched:
        _put_tokens(run, range(run.rows), tokens)  # first, so that a stream does not wait for kernels to be built
    try:
        with current(cache.device), run.model.graphs.step(cache.rows, run.chooser, cache, native=native) as step:
            step.begin(
                cache, first, run.stopping.most, run.stopping.eos,
                seed=run.chooser.seed, numbers=run.row_ids, prompts=run.prompt_lengths,
            )  # fmt: skip
            step.capture()
            return _replay(run, step, watched, start)
    except CaptureError as problem:  # raised before any token is fed
        return decode_plain(run, str(problem), unexpected=True, first=first if watched else None)


def _replay(run: Run, step: CapturedStep, watched: bool, start: list[int]) -> StrategyOutput:
    """Replays the step until every row has ended.

    watched   the host reads every token, and the first tokens are already in `run.stopping`
    start     tokens that each row held before the first new one
    """
    cache, stopping = run.cache, run.stopping
    try:
        if watched:
            _replay_watched(run, step)
        else:
            _replay_ahead(step, max(stopping.most))
    finally:
        lengths = cache.clock.sync()
        if cache.pages is not None:
            cache.pages.shrink(lengths)  # pages were allocated a few steps ahead
    tokens = [row[a:b] for row, a, b in zip(cache.record.tolist(), start, lengths, strict=True)]
    for row, new in enumerate(tokens if not watched else ()):
        for token in new:
            stopping.put(row, token)
        if run.chooser.may_exclude_all and stopping.rows[row].reason is None:
            raise run.no_token_error(row)
    return StrategyOutput(tokens, [reason or "" for reason in stopping.reasons], cache, step.how)


def _put_tokens(run: Run, rows: Iterable[int], tokens: Sequence[int]) -> None:
    """Passes the next token of each of these rows to `stopping` and `on_token`. tokens: of all rows of the run"""
    for row in rows:
        reason = run.stopping.put(row, tokens[row])
        if run.on_token:
            run.on_token(row, tokens[row], reason)


def _replay_watched(run: Run, step: CapturedStep) -> None:
    """Replays one step at a time and reads its tokens: rows may end for reasons that only the host knows."""
    live = list(range(run.rows))
    while live:
        reasons = run.stopping.reasons
        for row in live:
            if reasons[row] in ("stop", "time"):
                step.remaining[row] = 1  # the next step feeds the row's last token and ends it
        step.run(1, live)
        live = [row for row in live if reasons[row] is None]
        if not run.chooser.may_exclude_all:
            tokens = step.ids[:, 0].tolist()
        else:
            tokens, alive = torch.stack([step.ids[:, 0], step.counts]).tolist()
            if out := [row for row in live if not alive[row]]:
                raise run.no_token_error(out[0])
        _put_tokens(run, live, tokens)


def _replay_ahead(step: CapturedStep, most: int) -> None:
    """Queues up to `most` steps in rounds of AHEAD, until no row is live."""
    live_rows, live = _LiveRows(step.counts), list(range(step.rows))
    for done in range(0, most, AHEAD):
        step.run(min(AHEAD, most - done), live)
        live = live_rows.poll()
        if not live:
            break


class _LiveRows:
    """Reads which rows are live without making the device wait: each poll starts an asynchronous copy of counts [B] and
    returns the copy that the poll before started."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts  # on the device: 0 for a row that has ended
        self.copied = torch.ones(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self.event = torch.cuda.Event() if counts.is_cuda else None
        self.polled = False

    def poll(self) -> list[int]:
        if self.polled and self.event is not None:
            self.event.synchronize()
        live = [row for row, count in enumerate(self.copied.tolist()) if count]
        self.copied.copy_(self.counts, non_blocking=True)
        if self.event is not None:
            self.event.record()
        self.polled = True
        return live
