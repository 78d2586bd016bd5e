"""The decode steps that are timed: those of `generate`, greedy, with every row going on."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.model import Model
from lamina.runtime import why_not_captured
from lamina.runtime.native.eligibility import why_not_native
from lamina.sampling.chooser import Chooser


@torch.no_grad()
def run_steps(model: Model, cache: Cache, ids: Tensor, n: int) -> Tensor:
    """Feeds ids [B] and then n - 1 tokens that the model chose; -> the ids chosen last [B]"""
    captured = why_not_captured(model, cache) is None
    if captured or why_not_native(model, cache) is None:
        with model.graphs.step(cache.rows, Chooser(), cache, native=not captured) as step:
            step.begin(cache, ids, [n] * cache.rows, ())
            step.run(n)
            return step.ids[:, 0].clone()
    for _ in range(n):
        logits = model(ids[:, None], cache=cache, logits="last")
        assert logits is not None
        ids = logits.argmax(dim=-1)
        ids.tolist()  # stop rules look at every token
    return ids
