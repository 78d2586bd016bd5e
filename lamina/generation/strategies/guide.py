"""Classifier-free guidance: a second cache follows the rows with a negative prompt, and scores are led away from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.recompute import recompute_cache
from lamina.errors import InputError
from lamina.generation.feed import prefill
from lamina.generation.prompt import Prompt, from_rows, prompt_of
from lamina.generation.room import make_room
from lamina.runtime.feed import feed_one
from lamina.sampling.guidance import guide_scores

if TYPE_CHECKING:
    from lamina.generation.settings.settings import Settings
    from lamina.model import Model


class Guide:
    """The rows' other selves, which read the negative prompt instead of the prompt and then the same new tokens."""

    def __init__(
        self, model: Model, prompt: Prompt, scale: float, times: int, most: int, chunk: int | None, remembers: bool
    ) -> None:
        """times: how many sequences each row of the prompt becomes; most: how many new tokens they get"""
        rows = len(prompt.counts)
        cache = model.new_cache(rows) if remembers else recompute_cache(model, rows)
        make_room(cache, prompt.counts, [most] * rows)
        logits = prefill(model, prompt, cache, chunk)
        self.model, self.scale = model, scale
        self.cache, self.logits = cache.repeat(times), logits.repeat_interleave(times, dim=0)

    def lead(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Scores [R, V] of these rows, led away from what the negative prompt would give."""
        return guide_scores(logits.float(), self.logits[list(rows)].float(), self.scale)

    def feed(self, ids: Tensor, rows: Sequence[int]) -> None:
        """Feeds the tokens ids [R] that these rows got."""
        logits, _ = feed_one(self.model, self.cache, ids, rows)
        self.logits = self.logits.index_copy(0, torch.tensor(list(rows), device=logits.device), logits)


def negative_of(model: Model, settings: Settings, cache: Cache, rest: Sequence[list[int]]) -> Prompt | None:
    """What the settings ask guidance to lead away from: the negative prompt, or each prompt's last token alone.

    rest    what each row of the cache is still to be fed of its prompt
    """
    scale, rows = settings.guidance_scale, cache.rows
    if scale is None or scale == 1:
        return None
    if model.start_ids:
        raise InputError(
            f"guidance_scale={scale}: {type(model).__name__} reads a source, and guidance leads away from what the "
            "decoder alone begins with; leave it out"
        )
    if settings.negative_prompt is not None:
        negative = prompt_of(model, settings.negative_prompt, settings=settings)
    else:
        lasts = [(new or held)[-1:] for new, held in zip(rest, cache.tokens, strict=True)]
        if [-1] in lasts:
            raise InputError("guidance leads away from the last token, and that was embedded: give a negative_prompt")
        negative = from_rows(lasts)
    if len(negative.counts) not in (1, rows):
        raise InputError(
            f"{len(negative.counts)} negative prompts were given for {rows} prompts: give one, or one for each"
        )
    return negative


def guide_of(model: Model, settings: Settings, negative: Prompt | None, rows: int, most: int) -> Guide | None:
    """The guide for so many sequences, of which each gets `most` new tokens at most; none without something to lead
    away from."""
    if negative is None or settings.guidance_scale is None:
        return None
    times = rows // len(negative.counts)
    return Guide(model, negative, settings.guidance_scale, times, most, settings.prefill_chunk, settings.use_cache)
