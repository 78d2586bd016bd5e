"""Classifier-free guidance: a second cache follows the rows with a negative prompt, and scores are led away from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.generation.guidance import guided
from lamina.generation.prefill import prefill
from lamina.generation.prompt import Prompt

if TYPE_CHECKING:
    from lamina.model import Model


class Guide:
    """The rows' other selves, which read the negative prompt instead of the prompt and then the same new tokens."""

    def __init__(self, model: Model, prompt: Prompt, scale: float, times: int, chunk: int | None) -> None:
        """times: how many sequences each row of the prompt becomes."""
        cache = model.new_cache(len(prompt.counts))
        logits = prefill(model, prompt, cache, chunk)
        self.model, self.scale = model, scale
        self.cache, self.logits = cache.repeat(times), logits.repeat_interleave(times, dim=0)

    def lead(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Scores [R, V] of these rows, led away from what the negative prompt would give."""
        return guided(logits.float(), self.logits[list(rows)].float(), self.scale)

    def feed(self, ids: Tensor, rows: Sequence[int]) -> None:
        """Feeds the tokens ids [R] that these rows got."""
        step = self.cache.step(1, rows=rows)
        try:
            logits = self.model.forward(ids[:, None], step, logits="last")
        except BaseException:
            step.abort()
            raise
        step.commit()
        assert logits is not None
        self.logits = self.logits.index_copy(0, torch.tensor(list(rows), device=logits.device), logits)
