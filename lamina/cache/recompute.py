"""A cache that remembers nothing but ids: every pass over it is a pass over whole rows.

It is what `use_cache=False` decodes with, whatever the strategy: slow, and the definition that everything else is
checked by. A source, which is given once, is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.cache.layers.base import Key
from lamina.cache.step import Step
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.model import Logits, Model

Crossed = Mapping[Key, Mapping[str, Tensor]]
"""What cross-attending layers read of a source, by layer and entry: k, v, lengths."""


def forgetful(model: Model, rows: int) -> Cache:
    """Such a cache for a model."""
    sources = [{name: spec for name, spec in entry.items() if spec.reads_source} for entry in model.specs]
    cache = Cache(
        sources, rows=rows, dtype=model.dtype, device=model.device, max_positions=model.max_positions, model=model
    )
    cache.recomputes = True
    return cache


def pass_anew(model: Model, ids: Tensor, step: Step, logits: Logits, hidden: Collection[int]) -> Tensor | None:
    """`Model.forward` over all that the rows hold and these ids [R, T]: the logits and hidden states of the ids."""
    cache = step.cache
    assert cache is not None
    rows = list(range(cache.rows)) if step.rows is None else step.rows
    held, counts = cache.tokens, step.all_counts.tolist()
    texts = [held[row] + new[:n] for row, new, n in zip(rows, ids.tolist(), counts, strict=True)]
    crossed = {key: {name: step.take(x) for name, x in data.items()} for key, data in crossed_by(cache).items()}
    whole, alone = whole_pass(model, texts, crossed)
    found = model.forward(whole, alone, None if logits is None else "all", hidden=hidden)
    ours = step.before[:, None] + torch.arange(step.T, device=ids.device)  # where the ids lie in their rows
    ours = ours.clamp(max=whole.shape[1] - 1)

    def of_ids(x: Tensor) -> Tensor:
        return torch.take_along_dim(x, ours[..., None], dim=1)

    step.hidden = {layer: of_ids(x) for layer, x in alone.hidden.items()}
    step.has_run(ids)
    if found is None:
        return None
    step.logits = of_ids(found)
    if logits == "last":
        step.logits = step.logits[torch.arange(len(rows), device=ids.device), (step.all_counts - 1).clamp(min=0)]
    return step.logits


def whole_pass(model: Model, rows: Sequence[Sequence[int]], crossed: Crossed) -> tuple[Tensor, Step]:
    """A pass without a past over whole rows, and its ids [B, S]."""
    for r, row in enumerate(rows):
        if -1 in row:
            raise InputError(
                f"token {list(row).index(-1)} of row {r} was given as an embedding, and whole rows are computed from "
                "ids: give ids"
            )
    counts = [len(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(model.device)
    layers = [{name: spec.layer(None) for name, spec in entry.items()} for entry in model.specs]
    real = None if len(set(counts)) == 1 else on_device(counts, model.device)
    step = Step.alone(layers, (ids.shape[0], ids.shape[1]), model.device, real)
    step.source = crossed
    return ids, step


def crossed_by(cache: Cache) -> Crossed:
    """What a cache holds of its rows' sources."""
    return {
        (i, name): layer.data
        for i, entry in enumerate(cache.layers)
        for name, layer in entry.items()
        if layer.spec.reads_source
    }
