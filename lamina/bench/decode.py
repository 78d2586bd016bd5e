"""The decode steps that are timed: those of `generate`, greedy, with every row going on."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.model import Model


@torch.no_grad()
def run_steps(model: Model, cache: Cache, ids: Tensor, n: int) -> Tensor:
    """Feeds ids [B] and then n - 1 tokens that the model chose; -> the ids chosen last [B]"""
    for _ in range(n):
        step = cache.step(1)
        logits = model.forward(ids[:, None], step, logits="last")
        step.commit()
        assert logits is not None
        ids = logits.argmax(dim=-1)
        ids.tolist()  # stop rules look at every token
    return ids
