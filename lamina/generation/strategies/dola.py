"""DoLa: decoding by contrasting layers (https://arxiv.org/abs/2309.03883).

The logits of the last layer are contrasted with those that the head computes from an earlier layer, the *premature*
one: of the candidate layers, the one whose distribution differs most from the last layer's. It is chosen for every
token of every row.

    score(v) = log p_last(v) - log p_early(v)       if p_last(v) >= 0.1 · max p_last, else -inf

The head is applied to the hidden states without the model's final norm. Layers are counted as in `Model.forward`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.generation.introspect import hidden_states
from lamina.generation.run import Run, StrategyOutput
from lamina.runtime.feed import feed_one
from lamina.sampling.exclusion import LEAST, excluders

if TYPE_CHECKING:
    from lamina.model import Model

RELATIVE_TOP = 0.1  # tokens less likely than this share of the most likely one get -inf
DEEP = 40  # in models with more layers, only the 20 lowest or highest are candidates


def premature_layers(model: Model, chosen: str | Sequence[int]) -> list[int]:
    """The candidate layers: every second one of the lower ("low") or upper ("high") half, or the given ones."""
    depth = len(model.blocks)
    if chosen == "low":
        first, half = _first_useful(model), 20 if depth > DEEP else depth // 2
        return list(range(first, half, 2)) or [first]
    if chosen == "high":
        return list(range(depth - 20 if depth > DEEP else depth // 2, depth, 2))
    if isinstance(chosen, str) or not chosen or not all(0 <= layer < depth for layer in chosen):
        raise InputError(
            f'dola_layers={chosen!r}: give "low", "high" or layers from 0 (the embedding) to {depth - 1}; they are '
            f"contrasted with the last layer {depth}"
        )
    return list(chosen)


@torch.no_grad()
def check_layers(model: Model, chosen: str | Sequence[int]) -> None:
    """Raises if there are no such candidate layers, or the head cannot be applied to their hidden states."""
    premature_layers(model, chosen)
    if getattr(model, "head", None) is None:
        raise InputError(
            f"dola_layers: {type(model).__name__} has no `head`, which would be applied to earlier layers: leave it out"
        )
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    wide = model.enter(model.embed(zero), zero)[0].shape[-1]
    if wide != (reads := getattr(model.head, "in_features", wide)):
        raise InputError(
            f"dola_layers: hidden states of {type(model).__name__} are {wide} wide, and its head reads {reads} values, "
            "so it cannot be applied to an earlier layer"
        )


def _first_useful(model: Model) -> int:
    """The lowest useful layer. If the head is tied to the embedding, it maps the lowest layers back to their input
    token, so they are skipped."""
    depth, embedding = len(model.blocks), getattr(model, "embedding", None)
    tied = embedding is not None and embedding.weight is model.head.weight
    return min(2, depth - 1) if tied else 0


def contrast(last: Tensor, early: Tensor) -> Tensor:
    """last [B, V]: logits of the last layer; early [N, B, V]: of the N candidate layers. -> scores [B, V]"""
    scores, candidates = last.log_softmax(dim=-1), early.log_softmax(dim=-1)
    base = candidates[0] if len(candidates) == 1 else _farthest(scores, candidates)
    out = scores < scores.amax(dim=-1, keepdim=True) + math.log(RELATIVE_TOP)
    return (scores - base).masked_fill(out, -torch.inf)


def _farthest(last: Tensor, early: Tensor) -> Tensor:
    """Per row, the candidate that differs most from the last layer, by KL(m‖last) + KL(m‖early) with m their mean.

    last [B, V] and early [N, B, V] are log-probabilities. -> [B, V]
    """
    mean = (last.exp() + early.exp()) / 2  # [N, B, V]
    divergence = (2 * mean.xlogy(mean) - mean * (last + early)).sum(dim=-1)  # [N, B]
    return early.gather(0, divergence.argmax(dim=0)[None, :, None].expand(1, *last.shape))[0]


@torch.no_grad()
def dola(run: Run) -> StrategyOutput:
    """Continues every row by contrasting `dola_layers`, one pass per token over the rows that go on."""
    model, chooser, bans = run.model, run.chooser, excluders(run.chooser.processors)
    assert run.settings.dola_layers is not None
    layers = premature_layers(model, run.settings.dola_layers)
    tokens: list[list[int]] = [[] for _ in run.prompt_lengths]
    reasons = [""] * len(tokens)
    live, logits = list(range(len(tokens))), run.logits
    row_ids = torch.tensor(run.row_ids, device=logits.device)
    ends = torch.tensor(run.prompt_lengths, device=logits.device) - 1
    prompts = hidden_states(run.cache, layers)
    states = torch.stack([prompts[layer][torch.arange(len(live)), ends] for layer in layers])  # [N, B, width]
    del prompts
    while live:
        history = run.history(live)
        early = model.head(states.to(model.dtype)).float()
        scores = chooser.scores(contrast(logits.float(), early), history)
        if bans and bool((stuck := scores.amax(dim=-1) <= LEAST).any()):
            # Processors exclude every token above RELATIVE_TOP: the last layer alone decides among the others.
            scores = torch.where(stuck[:, None], chooser.scores(logits, history), scores)
        chosen = chooser.choose(scores, row_ids[live], history.lengths)
        if run.recorder is not None:
            run.recorder.add(live, logits, scores, chosen)
        going = run.add_tokens(live, run.to_host(chosen, scores, live), tokens, reasons)
        fed, step = feed_one(model, run.cache, chosen, live, hidden=layers)
        logits = fed[going]
        states = torch.stack([step.hidden[layer][:, 0] for layer in layers])[:, going]
        live = [live[at] for at in going]
    return StrategyOutput(tokens, reasons, run.cache)
