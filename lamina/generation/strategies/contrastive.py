"""Contrastive search: of the `top_k` most likely tokens, chooses one that is likely and unlike the tokens so far.

A candidate v is scored by

    (1 - alpha) · p(v)  -  alpha · max over the tokens j so far of cos(h_v, h_j)

where h is the last hidden state after the model's final norm (https://arxiv.org/abs/2202.06417). To compute h_v, each
prompt has `top_k` equal rows in a second cache. Each row is fed one candidate; then all rows become a copy of the best
one, which copies one token (`Cache.reorder`). At the end, the chosen tokens are fed to the run's own cache in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.cache.cache import Cache
from lamina.errors import CapacityError
from lamina.generation.feed import feed_rows
from lamina.generation.introspect import hidden_states
from lamina.generation.run import Run, StrategyOutput
from lamina.runtime.feed import feed_one
from lamina.sampling.exclusion import LEAST


class PastStates:
    """The normalized hidden states of the tokens so far, [B, S, width]. S doubles when a row is full."""

    def __init__(self, states: Tensor, lengths: Sequence[int]) -> None:
        self.states = F.normalize(states.float(), dim=-1)
        self.lengths, self.longest = torch.tensor(lengths, device=states.device), max(lengths)

    def max_similarity(self, states: Tensor) -> Tensor:
        """The largest cosine similarity of each candidate [B, k, width] to a token so far. -> [B, k]"""
        cosines = F.normalize(states.float(), dim=-1) @ self.states.transpose(1, 2)  # [B, k, S]
        there = torch.arange(self.states.shape[1], device=states.device) < self.lengths[:, None]
        return cosines.masked_fill(~there[:, None], -torch.inf).amax(dim=-1)

    def add(self, states: Tensor) -> None:
        """Appends one token to every row: states [B, width]"""
        if self.longest == self.states.shape[1]:
            self.states = F.pad(self.states, (0, 0, 0, self.longest))
        rows = torch.arange(len(states), device=states.device)
        self.longest += 1
        self.states[rows, self.lengths] = F.normalize(states.float(), dim=-1)
        self.lengths = self.lengths + 1

    def select(self, rows: Sequence[int]) -> None:
        """Keeps only these rows."""
        index = torch.tensor(rows, device=self.states.device)
        self.states, self.lengths = self.states[index], self.lengths[index]


@torch.no_grad()
def contrastive_search(run: Run) -> StrategyOutput:
    """Continues every row by contrastive search with `penalty_alpha` and `top_k`."""
    model, settings = run.model, run.settings
    alpha, k = settings.penalty_alpha, min(settings.top_k, run.logits.shape[-1])
    assert alpha is not None
    tokens: list[list[int]] = [[] for _ in run.prompt_lengths]
    reasons = [""] * len(tokens)
    candidates = [run.cache.repeat(k)]
    try:
        _search(run, alpha, k, tokens, reasons, candidates)
    except CapacityError:
        candidates.pop().release()  # frees memory for the chosen tokens
        feed_rows(model, run.cache, tokens)
        raise
    del candidates
    return StrategyOutput(tokens, reasons, feed_rows(model, run.cache, tokens))


def _search(
    run: Run, alpha: float, k: int, tokens: list[list[int]], reasons: list[str], candidates: list[Cache]
) -> None:
    """Fills in each row's new tokens and why it ended.

    candidates   a list of one cache, with k rows for each live row; a list, so that the caller can release the latest
    """
    model, depth = run.model, len(run.model.blocks)
    states = model.finish(hidden_states(run.cache, (depth,))[depth])
    past = PastStates(states, run.prompt_lengths)
    live, logits, cache = list(range(len(tokens))), run.logits, candidates[0]
    while True:
        history = run.repeat(cache, live, k).history(range(0, len(live) * k, k))  # the first of each k equal rows
        scores = run.chooser.scores(logits, history)
        likely, ids = scores.softmax(dim=-1).topk(k)  # [R, k]
        before = [run.prompt_lengths[row] + len(tokens[row]) for row in live]
        tried, step = feed_one(model, cache, ids.flatten(), hidden=(depth,))
        states = model.finish(step.hidden[depth][:, 0]).unflatten(0, (-1, k))  # [R, k, width]
        merit = (1 - alpha) * likely - alpha * past.max_similarity(states)
        # If processors allow fewer than k ids, some candidates are excluded ids.
        best = merit.masked_fill(scores.gather(1, ids) <= LEAST, -torch.inf).argmax(dim=-1)
        rows = torch.arange(len(live), device=best.device)
        past.add(states[rows, best])
        if run.recorder is not None:
            run.recorder.add(live, logits, scores, ids[rows, best])
        chosen, places = torch.stack([ids[rows, best], best]).tolist()
        if run.chooser.may_exclude_all:
            run.to_host(ids[rows, best], scores, live)
        going = run.add_tokens(live, chosen, tokens, reasons)
        if not going:
            return
        logits = tried.unflatten(0, (-1, k))[rows, best][going]
        sources = [at * k + places[at] for at in going for _ in range(k)]
        if len(going) == len(live):
            cache.reorder(sources, [length for length in before for _ in range(k)])
        else:
            cache = candidates[0] = cache.select(sources)
            past.select(going)
            live = [live[at] for at in going]
