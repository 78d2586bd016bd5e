"""`Guide`: classifier-free guidance with a second cache, which holds a negative prompt and the same new tokens.

The rows' scores are moved away from the scores of that cache; lamina/sampling/guidance.py has the arithmetic.
"""

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
    """A second cache, whose rows hold the negative prompt instead of the prompt, and then the same new tokens."""

    def __init__(
        self, model: Model, prompt: Prompt, scale: float, times: int, most: int, chunk: int | None, remembers: bool
    ) -> None:
        """
        prompt      the negative prompt
        times       sequences per row of the negative prompt
        most        new tokens that each sequence may get
        chunk       tokens per prefill pass; None: one pass
        remembers   False if the call has use_cache=False
        """
        rows = len(prompt.counts)
        cache = model.new_cache(rows) if remembers else recompute_cache(model, rows)
        make_room(cache, prompt.counts, [most] * rows)
        logits = prefill(model, prompt, cache, chunk)
        self.model, self.scale = model, scale
        self.cache, self.logits = cache.repeat(times), logits.repeat_interleave(times, dim=0)

    def apply(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [R, V] of these rows -> scores [R, V], moved away from those after the negative prompt."""
        return guide_scores(logits.float(), self.logits[list(rows)].float(), self.scale)

    def feed(self, ids: Tensor, rows: Sequence[int]) -> None:
        """Feeds the new tokens ids [R] of these rows to the second cache."""
        logits, _ = feed_one(self.model, self.cache, ids, rows)
        self.logits = self.logits.index_copy(0, torch.tensor(list(rows), device=logits.device), logits)


def negative_prompt_of(model: Model, settings: Settings, cache: Cache, rest: Sequence[list[int]]) -> Prompt | None:
    """The negative prompt of guidance: `negative_prompt`, or each prompt's last token. None without guidance.

    rest    ids of each prompt that the cache does not hold yet
    """
    scale, rows = settings.guidance_scale, cache.rows
    if scale is None or scale == 1:
        return None
    if model.start_ids:
        raise InputError(
            f"guidance_scale={scale}: {type(model).__name__} reads a source, and guidance is for decoder-only models; "
            "leave it out"
        )
    if settings.negative_prompt is not None:
        negative = prompt_of(model, settings.negative_prompt, settings=settings)
        if negative.ids is not None:
            model.check_ids(negative.ids, negative.counts)
    else:
        lasts = [(new or held)[-1:] for new, held in zip(rest, cache.tokens, strict=True)]
        if [-1] in lasts:
            raise InputError("guidance uses the prompt's last token, and that was embedded: give a negative_prompt")
        negative = from_rows(lasts)
    if len(negative.counts) not in (1, rows):
        raise InputError(
            f"{len(negative.counts)} negative prompts were given for {rows} prompts: give one, or one for each"
        )
    return negative


def guide_of(model: Model, settings: Settings, negative: Prompt | None, rows: int, most: int) -> Guide | None:
    """The guide for `rows` sequences that may get `most` new tokens each; None without a negative prompt."""
    if negative is None or settings.guidance_scale is None:
        return None
    times = rows // len(negative.counts)
    return Guide(model, negative, settings.guidance_scale, times, most, settings.prefill_chunk, settings.use_cache)
