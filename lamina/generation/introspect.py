"""Hidden states and attention weights of the rows of a cache.

Decoding does not keep them. `introspect` recomputes them afterwards in one pass over the whole rows, so they work with
every strategy and with ragged rows, and cost nothing unless asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.layers.base import Key
from lamina.cache.ops.attach import cross_inputs_of
from lamina.cache.recompute import uncached_pass


@dataclass(frozen=True)
class Introspection:
    """Per row:

    hidden       [tokens, width] for each layer: the input of the first block, the output of each block but the last,
                 and the output of the last block after the model's final norm
    attentions   [heads, tokens, keys] attention weights, for each (layer, entry) that attends
    """

    hidden: list[list[Tensor]]
    attentions: list[dict[Key, Tensor]]


@torch.no_grad()
def introspect(cache: Cache, *, hidden: bool = True, attentions: bool = False) -> Introspection:
    """Runs one pass over all tokens of a cache's rows, and returns the hidden states and attention weights asked for.

    >>> introspect(model.generate("The sky is").cache).hidden[0][-1].shape     # doctest: +SKIP
    torch.Size([24, 576])
    """
    model, rows, crossed = cache.model, cache.tokens, cross_inputs_of(cache)
    assert model is not None
    groups = {0: list(range(len(rows)))}
    if attentions and not model.takes_packed:  # it may run rows of different lengths by several calls, not recorded
        groups = {}
        for r, row in enumerate(rows):
            groups.setdefault(len(row), []).append(r)
    found = Introspection([[] for _ in rows] if hidden else [], [{} for _ in rows] if attentions else [])
    depth = len(model.blocks)
    for group in groups.values():
        some = {key: {name: x[group] for name, x in inputs.items()} for key, inputs in crossed.items()}
        ids, step = uncached_pass(model, [rows[r] for r in group], some)
        attended = step.record_attentions() if attentions else {}
        model.forward(ids, step, logits=None, hidden=range(depth + 1) if hidden else ())
        if hidden:
            step.hidden[depth] = model.finish(step.hidden[depth])
        for at, r in enumerate(group):
            n = len(rows[r])
            if hidden:
                found.hidden[r] = [step.hidden[layer][at, :n] for layer in range(depth + 1)]
            for key, (weights, positions) in attended.items():
                found.attentions[r][key] = weights[at, :, :n, : int((positions[at] >= 0).sum())]
    return found


def hidden_states(cache: Cache, layers: Collection[int]) -> dict[int, Tensor]:
    """Hidden states [B, S, width] of all tokens of the rows, by layer as `Model.forward` counts them. Values past a
    row's end are undefined."""
    assert cache.model is not None
    ids, step = uncached_pass(cache.model, cache.tokens, cross_inputs_of(cache))
    cache.model.forward(ids, step, logits=None, hidden=layers)
    return step.hidden
