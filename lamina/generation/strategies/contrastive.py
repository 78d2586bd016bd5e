"""Contrastive search: of the `top_k` most likely tokens, the one that is likely and does not repeat what was said.

A candidate v is scored by

    (1 - alpha) · p(v)  -  alpha · max over the tokens j so far of cos(h_v, h_j)

where h is the last hidden state, after the model's own norm (https://arxiv.org/abs/2202.06417). To know h_v the
candidates are tried: each prompt has `top_k` rows of a cache, alike before every token, each takes one candidate, and
then all become the row of the best one, which copies one token (`Cache.reorder`). In the end the chosen tokens are fed
to the run's own cache in one pass.
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
from lamina.generation.run import Made, Run
from lamina.runtime.feed import feed_one
from lamina.sampling.exclusion import LEAST


class Context:
    """The directions of the hidden states so far: [B, S, width] of length 1. S doubles when a row is full."""

    def __init__(self, states: Tensor, lengths: Sequence[int]) -> None:
        self.room = F.normalize(states.float(), dim=-1)
        self.lengths, self.longest = torch.tensor(lengths, device=states.device), max(lengths)

    def likeness(self, states: Tensor) -> Tensor:
        """How much each candidate [B, k, width] is like the token it is most like. -> [B, k]"""
        cosines = F.normalize(states.float(), dim=-1) @ self.room.transpose(1, 2)  # [B, k, S]
        there = torch.arange(self.room.shape[1], device=states.device) < self.lengths[:, None]
        return cosines.masked_fill(~there[:, None], -torch.inf).amax(dim=-1)

    def add(self, states: Tensor) -> None:
        """One more token in every row: states [B, width]"""
        if self.longest == self.room.shape[1]:
            self.room = F.pad(self.room, (0, 0, 0, self.longest))
        rows = torch.arange(len(states), device=states.device)
        self.longest += 1
        self.room[rows, self.lengths] = F.normalize(states.float(), dim=-1)
        self.lengths = self.lengths + 1

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on."""
        index = torch.tensor(rows, device=self.room.device)
        self.room, self.lengths = self.room[index], self.lengths[index]


@torch.no_grad()
def contrastive_search(run: Run) -> Made:
    """Continues every row by contrastive search with `penalty_alpha` and `top_k`."""
    model, settings = run.model, run.settings
    alpha, k = settings.penalty_alpha, min(settings.top_k, run.logits.shape[-1])
    assert alpha is not None
    tokens: list[list[int]] = [[] for _ in run.prompts]
    reasons = [""] * len(tokens)
    tried = [run.cache.repeat(k)]
    try:
        _search(run, alpha, k, tokens, reasons, tried)
    except CapacityError:
        tried.pop().release()  # which makes room
        feed_rows(model, run.cache, tokens)
        raise
    del tried
    return Made(tokens, reasons, feed_rows(model, run.cache, tokens))


def _search(
    run: Run, alpha: float, k: int, tokens: list[list[int]], reasons: list[str], candidates: list[Cache]
) -> None:
    """Fills in each row's new tokens and why it ended. candidates: the cache of k rows for each row that goes on"""
    model, depth = run.model, len(run.model.blocks)
    states = model.finish(hidden_states(run.cache, (depth,))[depth])
    context = Context(states, run.prompts)
    live, logits, cache = list(range(len(tokens))), run.logits, candidates[0]
    while True:
        history = run.spread(cache, live, k).history(range(0, len(live) * k, k))
        scores = run.chooser.scores(logits, history)
        likely, ids = scores.softmax(dim=-1).topk(k)  # [R, k]
        before = [run.prompts[row] + len(tokens[row]) for row in live]
        tried, step = feed_one(model, cache, ids.flatten(), hidden=(depth,))
        states = model.finish(step.hidden[depth][:, 0]).unflatten(0, (-1, k))  # [R, k, width]
        merit = (1 - alpha) * likely - alpha * context.likeness(states)
        # Where fewer than k ids are allowed, some candidates are excluded ones.
        best = merit.masked_fill(scores.gather(1, ids) <= LEAST, -torch.inf).argmax(dim=-1)
        rows = torch.arange(len(live), device=best.device)
        context.add(states[rows, best])
        if run.kept is not None:
            run.kept.add(live, logits, scores, ids[rows, best])
        chosen, places = torch.stack([ids[rows, best], best]).tolist()
        if run.chooser.may_exclude_all:
            run.read(ids[rows, best], scores, live)
        going = run.take(live, chosen, tokens, reasons)
        if not going:
            return
        logits = tried.unflatten(0, (-1, k))[rows, best][going]
        sources = [at * k + places[at] for at in going for _ in range(k)]
        if len(going) == len(live):
            cache.reorder(sources, [length for length in before for _ in range(k)])
        else:
            cache = candidates[0] = cache.select(sources)
            context.keep(going)
            live = [live[at] for at in going]
