"""What happens inside a model, for those who ask: hidden states, and what attention looks at.

Decoding keeps none of this. It is made afterwards by one pass over whole rows, so it is there for every strategy, in
ragged rows, and costs nothing where nobody asks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.layers.base import Key
from lamina.cache.recompute import cross_states_of, uncached_pass


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
    """Runs all that the rows of a cache hold once more, and keeps what is asked for.

    >>> look_inside(model.generate("The sky is").cache).hidden[0][-1].shape     # doctest: +SKIP
    torch.Size([24, 576])
    """
    model, rows = cache.model, cache.tokens
    assert model is not None
    ids, step = uncached_pass(model, rows, cross_states_of(cache))
    attended, depth = step.record_attentions() if attentions else {}, len(model.blocks)
    model.forward(ids, step, logits=None, hidden=range(depth + 1) if hidden else ())
    if hidden:
        step.hidden[depth] = model.finish(step.hidden[depth])
    found = Inside([], [])
    for r, row in enumerate(rows):
        n = len(row)
        if hidden:
            found.hidden.append([step.hidden[layer][r, :n] for layer in range(depth + 1)])
        if attentions:
            keys = {key: int((at[r] >= 0).sum()) for key, (_, at) in attended.items()}
            found.attentions.append({key: shares[r, :, :n, : keys[key]] for key, (shares, _) in attended.items()})
    return found


def hidden_states(cache: Cache, layers: Collection[int]) -> dict[int, Tensor]:
    """The hidden states of all that the rows hold, by layer as `Model.forward` counts them. [B, S, width] each; past a
    row's end they mean nothing"""
    assert cache.model is not None
    ids, step = uncached_pass(cache.model, cache.tokens, cross_states_of(cache))
    cache.model.forward(ids, step, logits=None, hidden=layers)
    return step.hidden
