"""What happens inside a model, for those who ask: hidden states, and what attention looks at.

Decoding keeps none of this. It is made afterwards by one pass over whole rows, so it is there for every strategy, in
ragged rows, and costs nothing where nobody asks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.cache.cross import CrossLayer, Source
from lamina.cache.layer import Key
from lamina.cache.step import Step
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.model import Model

Crossed = Mapping[Key, Mapping[str, Tensor]]
"""What cross-attending layers read of a source, by layer and entry: k, v, lengths."""


@dataclass(frozen=True)
class Inside:
    """For each row:

    hidden       what the first block reads, what each block but the last gives, and the last hidden state after the
                 model's own norm: [tokens, width] each
    attentions   for each (layer, entry) that attends, how much each token takes of each: [heads, tokens, keys]
    """

    hidden: list[list[Tensor]]
    attentions: list[dict[Key, Tensor]]


def look_inside(cache: Cache, *, hidden: bool = True, attentions: bool = False) -> Inside:
    """Runs all that the rows of a cache hold once more, and keeps what is asked for.

    >>> look_inside(model.generate("The sky is").cache).hidden[0][-1].shape     # doctest: +SKIP
    torch.Size([24, 576])
    """
    assert cache.model is not None
    return _look(cache.model, cache.tokens, _crossed(cache), hidden, attentions)


def look_inside_rows(
    model: Model,
    rows: Sequence[Sequence[int]],
    source: Source | None = None,
    *,
    hidden: bool = True,
    attentions: bool = False,
) -> Inside:
    """The same for rows of ids."""
    crossed = {} if source is None else model.crossed(source, len(rows))
    return _look(model, rows, crossed, hidden, attentions)


def hidden_states(cache: Cache, layers: Collection[int]) -> dict[int, Tensor]:
    """The hidden states of all that the rows hold, by layer as `Model.forward` counts them. [B, S, width] each; past a
    row's end they mean nothing"""
    assert cache.model is not None
    ids, step = _whole_pass(cache.model, cache.tokens, _crossed(cache))
    cache.model.forward(ids, step, logits=None, hidden=layers)
    return step.hidden


@torch.no_grad()
def _look(model: Model, rows: Sequence[Sequence[int]], crossed: Crossed, hidden: bool, attentions: bool) -> Inside:
    ids, step = _whole_pass(model, rows, crossed)
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


def _whole_pass(model: Model, rows: Sequence[Sequence[int]], crossed: Crossed) -> tuple[Tensor, Step]:
    """A pass without a past over whole rows, and its ids [B, S]."""
    for r, row in enumerate(rows):
        if -1 in row:
            raise InputError(
                f"token {list(row).index(-1)} of row {r} was given as an embedding: hidden states and attentions are "
                "computed from ids, so give ids"
            )
    counts = [len(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(model.device)
    layers = [{name: spec.layer(None) for name, spec in entry.items()} for entry in model.specs]
    real = None if len(set(counts)) == 1 else on_device(counts, model.device)
    step = Step.alone(layers, (ids.shape[0], ids.shape[1]), model.device, real)
    step.source = crossed
    return ids, step


def _crossed(cache: Cache) -> Crossed:
    return {
        (i, name): layer.data
        for i, entry in enumerate(cache.layers)
        for name, layer in entry.items()
        if isinstance(layer, CrossLayer)
    }
