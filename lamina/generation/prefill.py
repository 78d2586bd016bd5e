"""Prompts into a cache, whole or in pieces, ragged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lamina.cache.cache import Cache
from lamina.checkpoint.progress import Bar
from lamina.generation.prompt import Prompt

if TYPE_CHECKING:
    from lamina.model import Model


def prefill(model: Model, prompt: Prompt, cache: Cache, chunk: int | None = None) -> Tensor:
    """Feeds the prompt, at most `chunk` tokens of a row at a time; -> each row's logits after it [B, V].

    A row may have no token, where the cache knows the logits after what it holds.
    """
    ids, embeds, counts = prompt.ids, prompt.embeds, prompt.counts
    longest = max(counts)
    size = chunk or max(longest, 1)
    with Bar("reading the prompt", sum(counts), "tokens", longest > size) as bar:
        for start in range(0, longest, size):
            some = [min(max(count - start, 0), size) for count in counts]
            ends = any(start < count <= start + size for count in counts)
            piece = slice(start, start + max(some))
            model(
                None if ids is None else ids[:, piece],
                embeds=None if embeds is None else embeds[:, piece],
                cache=cache,
                counts=None if len(set(some)) == 1 else some,
                logits="last" if ends else None,
            )
            bar.advance(sum(some))
    assert cache.logits is not None
    return cache.logits.clone()
