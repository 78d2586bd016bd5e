"""Prompts into a cache, whole or in pieces, ragged; and what is left of prompts that a cache knows already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from lamina.cache.cache import Cache
from lamina.checkpoint.progress import Bar
from lamina.generation.prompt import Prompt, from_rows
from lamina.generation.reading import Reader

if TYPE_CHECKING:
    from lamina.model import Model

FEW = 4  # captured passes that take less time than a plain one, whose launches the host makes one by one


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
    logits = cache.logits
    assert logits is not None
    return logits


def feed_rest(model: Model, rest: Sequence[Sequence[int]], cache: Cache, chunk: int | None = None) -> Tensor:
    """`prefill` of what is left of each row: where that is little, by captured passes, if there are any."""
    reader, longest = Reader(model, cache), max(map(len, rest))
    most = reader.most
    if most is None or not 0 < longest <= FEW * most:
        return prefill(model, from_rows(rest, allow_empty=True), cache, chunk)
    for start in range(0, longest, most):
        piece = from_rows([row[start : start + most] for row in rest], allow_empty=True)
        assert piece.ids is not None
        reader.read_all(piece.ids.to(cache.device), range(cache.rows), piece.counts)
    logits = cache.logits
    assert logits is not None
    return logits
