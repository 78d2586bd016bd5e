"""Prompts into a cache, whole or in pieces, ragged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.checkpoint.progress import Bar
from lamina.generation.prompt import Prompt

if TYPE_CHECKING:
    from lamina.model import Model


def prefill(
    model: Model, prompt: Prompt, cache: Cache, chunk: int | None = None, rest: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """Feeds the prompt, at most `chunk` tokens of a row at a time; -> each row's logits after it [B, V].

    rest   what is still to be fed of each row's ids, where the cache holds the beginning; a row may have nothing left
    """
    ids, embeds, counts = prompt.ids, prompt.embeds, prompt.counts
    if rest is not None:
        counts = [len(row) for row in rest]
        ids = torch.zeros(len(rest), max(counts, default=0), dtype=torch.int64)
        for r, row in enumerate(rest):
            ids[r, : len(row)] = torch.tensor(row, dtype=torch.int64)
    size = max(counts) if chunk is None else chunk
    with Bar("reading the prompt", sum(counts), "tokens", max(counts) > size) as bar:
        for start in range(0, max(counts), max(size, 1)):
            some = [min(max(count - start, 0), size) for count in counts]
            ends = any(start < count <= start + size for count in counts)
            piece = slice(start, start + max(some))
            model(
                None if ids is None or embeds is not None else ids[:, piece],
                embeds=None if embeds is None else embeds[:, piece],
                cache=cache,
                counts=None if len(set(some)) == 1 else some,
                logits="last" if ends else None,
            )
            bar.advance(sum(some))
    assert cache.logits is not None
    return cache.logits.clone()
