"""What happens inside a model, for those who ask: hidden states, and what attention looks at.

Decoding keeps none of this. It is made afterwards by one pass over what the rows of a cache hold, so it is there for
every strategy, in ragged rows, and costs nothing where nobody asks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.cache.cross import CrossLayer
from lamina.cache.layer import Key
from lamina.cache.step import Step
from lamina.errors import InputError


@dataclass(frozen=True)
class Inside:
    """For each row:

    hidden       what the first block reads, what each block but the last gives, and the last hidden state after the
                 model's own norm: [tokens, width] each
    attentions   for each (layer, entry) that attends, how much each token takes of each: [heads, tokens, keys]
    """

    hidden: list[list[Tensor]]
    attentions: list[dict[Key, Tensor]]


@torch.no_grad()
def look_inside(cache: Cache, *, hidden: bool = True, attentions: bool = False) -> Inside:
    """Runs all that the rows hold once more, without a cache, and keeps what is asked for.

    >>> look_inside(model.generate("The sky is").cache).hidden[0][-1].shape     # doctest: +SKIP
    torch.Size([24, 576])
    """
    assert cache.model is not None
    model, depth = cache.model, len(cache.layers)
    step = _whole_pass(cache)
    attended = step.record_attentions() if attentions else {}
    model.forward(step.ids, step, logits=None, hidden=range(depth + 1) if hidden else ())
    if hidden:
        step.hidden[depth] = model.finish(step.hidden[depth])
    lengths = cache.clock.sync()
    return Inside(
        [[step.hidden[i][r, :n] for i in range(depth + 1)] for r, n in enumerate(lengths)] if hidden else [],
        [
            {key: shares[r, :, :n, : int((at[r] >= 0).sum())] for key, (shares, at) in attended.items()}
            for r, n in enumerate(lengths)
        ] if attentions else [],
    )  # fmt: skip


def hidden_states(cache: Cache, layers: Collection[int]) -> dict[int, Tensor]:
    """The hidden states of all that the rows hold, by layer as `Model.forward` counts them. [B, S, width] each; past a
    row's end they mean nothing"""
    assert cache.model is not None
    step = _whole_pass(cache)
    cache.model.forward(step.ids, step, logits=None, hidden=layers)
    return step.hidden


def _whole_pass(cache: Cache) -> Step:
    """A pass without a past over all tokens of all rows; `ids` [B, S] is set."""
    lengths = cache.clock.sync()
    ids = cache.record[:, : max(lengths)]
    counts = None if len(set(lengths)) == 1 else on_device(lengths, cache.device)
    layers = [{name: spec.layer(None) for name, spec in entry.items()} for entry in cache.specs]
    step = Step.alone(layers, (ids.shape[0], ids.shape[1]), cache.device, counts)
    unknown = ids < 0 if step.valid is None else (ids < 0) & step.valid
    if bool(unknown.any()):
        row, at = unknown.nonzero()[0].tolist()
        raise InputError(
            f"token {at} of row {row} was given as an embedding: hidden states and attentions are computed from ids, "
            "so give ids"
        )
    step.source = {
        (i, name): layer.data
        for i, entry in enumerate(cache.layers)
        for name, layer in entry.items()
        if isinstance(layer, CrossLayer)
    }
    step.ids = ids
    return step
