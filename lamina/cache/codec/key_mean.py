"""The mean key: one vector for each layer and key head of a model.

The keys of a head share a large component. Subtracting it before quantizing leaves smaller values, and so smaller
errors. Any constant would be correct; the mean makes the rest small. It is computed from one pass over fixed random
ids, so it belongs to the model and not to a row: rows with any contents can be joined, forked and rewound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.layers.base import Key
from lamina.cache.step import Step

if TYPE_CHECKING:
    from lamina.model import Model

TOKENS = 512


def key_means_of(model: Model) -> dict[Key, Tensor]:
    """The mean key [H, D] of each entry that has keys: computed at the first call, then kept with the model."""
    kept: dict[Key, Tensor] | None = model.__dict__.get("_key_means")
    if kept is None:
        with torch.inference_mode(False), torch.no_grad():
            kept = model.__dict__["_key_means"] = _compute_key_means(model)
    return kept


def _compute_key_means(model: Model) -> dict[Key, Tensor]:
    ids = torch.randint(model.vocab, (1, TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    tokens = min(TOKENS, model.max_positions or TOKENS)
    specs = model.specs
    step, keys = Step.alone(specs, (1, tokens), model.device), {}
    if any(spec.reads_source for entry in specs for spec in entry.values()):
        length = min(TOKENS, model.max_source_positions or TOKENS)
        source = model.random_source(1, length, torch.Generator().manual_seed(0))
        step.source = model.cross_inputs(source, 1)
        keys = {key: k for key, (k, _) in model.cross_states(source).items()}
    model.forward(ids[:, :tokens], step, logits=None)
    keys.update({key: k for key, (k, _, _) in step._shared.items()})
    return {key: k.to(torch.promote_types(k.dtype, torch.float32)).mean(dim=(0, 2)) for key, k in keys.items()}
