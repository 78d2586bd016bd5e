"""A cache that stores token ids only: every pass over it recomputes whole rows, without a KV cache.

`use_cache=False` decodes with it, in every decoding strategy. It is slow, and it is the reference that the other caches
are tested against. The keys and values of a source (encoder output) are stored, since a source is given only once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.cache.ops.attach import CrossInputs, cross_inputs_of
from lamina.cache.step import Step
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.model import Logits, Model


def recompute_cache(model: Model, rows: int) -> Cache:
    """A cache that stores ids only, for `use_cache=False`."""
    sources = [{name: spec for name, spec in entry.items() if spec.reads_source} for entry in model.specs]
    cache = Cache(
        sources, rows=rows, dtype=model.dtype, device=model.device, max_positions=model.max_positions, model=model
    )
    cache.recomputes = True
    return cache


def recompute_pass(model: Model, ids: Tensor, step: Step, logits: Logits, hidden: Collection[int]) -> Tensor | None:
    """`Model.forward` for such a cache: runs the stored tokens of each row followed by ids [R, T], without a KV cache.

    Sets `step.logits` and `step.hidden` for the ids alone, and returns the logits."""
    cache = step.cache
    assert cache is not None
    rows = list(range(cache.rows)) if step.rows is None else step.rows
    held, counts = cache.tokens, step.all_counts.tolist()
    texts = [held[row] + new[:n] for row, new, n in zip(rows, ids.tolist(), counts, strict=True)]
    crossed = {key: {name: step.take(x) for name, x in data.items()} for key, data in cross_inputs_of(cache).items()}
    whole, alone = uncached_pass(model, texts, crossed)
    found = model.forward(whole, alone, None if logits is None else "all", hidden=hidden)
    positions = step.before[:, None] + torch.arange(step.T, device=ids.device)  # [R, T] of the ids in their rows
    positions = positions.clamp(max=whole.shape[1] - 1)

    def of_ids(x: Tensor) -> Tensor:
        return torch.take_along_dim(x, positions[..., None], dim=1)

    step.hidden = {layer: of_ids(x) for layer, x in alone.hidden.items()}
    step.has_run(ids)
    if found is None:
        return None
    step.logits = of_ids(found)
    if logits == "last":
        step.logits = step.logits[torch.arange(len(rows), device=ids.device), (step.all_counts - 1).clamp(min=0)]
    return step.logits


def uncached_pass(model: Model, rows: Sequence[Sequence[int]], crossed: CrossInputs) -> tuple[Tensor, Step]:
    """The ids [B, S] of whole rows, padded on the right, and a pass without a cache over them."""
    for r, row in enumerate(rows):
        if -1 in row:
            raise InputError(
                f"token {list(row).index(-1)} of row {r} was given as an embedding, and whole rows are recomputed from "
                "ids: give ids"
            )
    counts = [len(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(model.device)
    real = None if len(set(counts)) == 1 else on_device(counts, model.device)
    step = Step.alone(model.specs, (ids.shape[0], ids.shape[1]), model.device, real)
    step.source = crossed
    return ids, step
