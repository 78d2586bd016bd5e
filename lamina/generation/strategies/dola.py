"""DoLa: what the last layer knows and an earlier one does not yet (https://arxiv.org/abs/2309.03883).

The logits of the last layer are contrasted with those that the head makes of an earlier layer, the *premature* one: the
candidate whose distribution is farthest from the last. It is chosen anew for every token of every row.

    score(v) = log p_last(v) - log p_early(v)       where p_last(v) >= 0.1 · max p_last; all other tokens are out

Hidden states go to the head as they are, without the model's last norm; layers are counted as in `Model.forward`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.generation.introspect import hidden_states
from lamina.generation.run import Made, Run
from lamina.runtime.feed import feed_one
from lamina.sampling.exclusion import LEAST, excluders

if TYPE_CHECKING:
    from lamina.model import Model

RELATIVE_TOP = 0.1
DEEP = 40  # layers; in deeper models only the 20 lowest or highest are candidates


def premature_layers(model: Model, chosen: str | Sequence[int]) -> list[int]:
    """The layers that are candidates: every second one of the lower or the upper half, or the given ones."""
    depth = len(model.blocks)
    if chosen == "low":
        first, half = _first_of_use(model), 20 if depth > DEEP else depth // 2
        return list(range(first, half, 2)) or [first]
    if chosen == "high":
        return list(range(depth - 20 if depth > DEEP else depth // 2, depth, 2))
    if isinstance(chosen, str) or not chosen or not all(0 <= layer < depth for layer in chosen):
        raise InputError(
            f'dola_layers={chosen!r}: give "low", "high" or layers from 0 (the embedding) to {depth - 1}, the last '
            f"layer {depth} being what they are contrasted with"
        )
    return list(chosen)


def _first_of_use(model: Model) -> int:
    """Where the head is the embedding it would only give the last token back, so the lowest layers say nothing."""
    depth, embedding = len(model.blocks), getattr(model, "embedding", None)
    tied = embedding is not None and embedding.weight is model.head.weight
    return min(2, depth - 1) if tied else 0


def contrast(last: Tensor, early: Tensor) -> Tensor:
    """last [B, V], early [N, B, V] logits of the candidates -> scores [B, V]"""
    scores, candidates = last.log_softmax(dim=-1), early.log_softmax(dim=-1)
    base = candidates[0] if len(candidates) == 1 else _farthest(scores, candidates)
    out = scores < scores.amax(dim=-1, keepdim=True) + math.log(RELATIVE_TOP)
    return (scores - base).masked_fill(out, -torch.inf)


def _farthest(last: Tensor, early: Tensor) -> Tensor:
    """For each row the candidate whose distribution is farthest from the last layer's. Both log-probabilities"""
    middle = (last.exp() + early.exp()) / 2  # [N, B, V]
    apart = (2 * middle.xlogy(middle) - middle * (last + early)).sum(dim=-1)  # both from their middle, weighed by it
    return early.gather(0, apart.argmax(dim=0)[None, :, None].expand(1, *last.shape))[0]


@torch.no_grad()
def dola(run: Run) -> Made:
    """Continues every row with `dola_layers`, one pass a token over the rows that go on."""
    model, chooser, bans = run.model, run.chooser, excluders(run.chooser.processors)
    assert run.settings.dola_layers is not None
    layers = premature_layers(model, run.settings.dola_layers)
    tokens: list[list[int]] = [[] for _ in run.prompts]
    reasons = [""] * len(tokens)
    live, logits = list(range(len(tokens))), run.logits
    numbers = torch.tensor(run.numbers, device=logits.device)
    ends = torch.tensor(run.prompts, device=logits.device) - 1
    prompts = hidden_states(run.cache, layers)
    states = torch.stack([prompts[layer][torch.arange(len(live)), ends] for layer in layers])  # [N, B, width]
    del prompts
    while live:
        history = run.history(live)
        early = model.head(states.to(model.dtype)).float()
        scores = chooser.scores(contrast(logits.float(), early), history)
        if bans and bool((stuck := scores.amax(dim=-1) <= LEAST).any()):
            # All plausible tokens are banned, so the last layer alone decides among the others.
            scores = torch.where(stuck[:, None], chooser.scores(logits, history), scores)
        chosen = chooser.choose(scores, numbers[live], history.lengths)
        if run.kept is not None:
            run.kept.add(live, logits, scores, chosen)
        going = run.take(live, run.read(chosen, scores, live), tokens, reasons)
        fed, step = feed_one(model, run.cache, chosen, live, hidden=layers)
        logits = fed[going]
        states = torch.stack([step.hidden[layer][:, 0] for layer in layers])[:, going]
        live = [live[at] for at in going]
    return Made(tokens, reasons, run.cache)
