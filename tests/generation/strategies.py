"""A strategy by itself: a run over prompts, with just the settings that strategies read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from lamina.cache.cache import Cache
from lamina.generation.prompt import from_rows
from lamina.generation.run import Chooser, Made, Run
from lamina.model import Model

PROMPTS = [[5, 9, 12, 3, 44, 8, 21, 60, 2, 17], [7], [30, 31, 32]]


class Ends:
    """Rows end by an end token, or when they have made as many tokens as they may."""

    def __init__(self, settings: Any, prompts: Sequence[int]) -> None:
        self.settings, self.prompts = settings, prompts

    def reason(self, row: int, tokens: Sequence[int]) -> str | None:
        if tokens[-1] in self.settings.eos_token_id:
            return "eos"
        return "length" if len(tokens) == self.settings.most_new(self.prompts[row]) else None


def settings_with(new: int, **values: Any) -> Any:
    known: dict[str, Any] = dict(
        num_beams=1, num_return_sequences=1, length_penalty=1.0, early_stopping=False, eos_token_id=(), top_k=50,
        penalty_alpha=None, dola_layers=None, output_scores=False, output_logits=False,
    )  # fmt: skip
    return SimpleNamespace(**known | values, most_new=lambda prompt: new)


def run_of(
    model: Model, prompts: Sequence[Sequence[int]], new: int, chooser: Chooser | None = None,
    cache: Cache | None = None, told: Any = None, **values: Any,
) -> Run:  # fmt: skip
    """A run whose prompts are in."""
    settings, prompt = settings_with(new, **values), from_rows(prompts)
    cache = model.new_cache(len(prompts)) if cache is None else cache
    logits = model(prompt.ids, cache=cache, counts=prompt.counts, logits="last")
    assert logits is not None
    lengths = cache.clock.sync()
    return Run(
        model, cache, logits, chooser or Chooser(), Ends(settings, lengths), lengths, list(range(len(prompts))),
        settings, told,
    )  # fmt: skip


def assert_can_be_continued(model: Model, made: Made, prompts: Sequence[Sequence[int]]) -> None:
    """The cache holds each sequence, and goes on from it as an uncached pass does."""
    each = len(made.tokens) // len(prompts)
    whole = [[*prompts[i // each], *tokens] for i, tokens in enumerate(made.tokens)]
    assert made.cache.tokens == whole
    more = [1, 2, 3]
    found = model([more] * len(whole), cache=made.cache, logits="last")
    expected = torch.cat([model([row + more], logits="last") for row in whole])  # type: ignore[misc]
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def argmax_of(scores: Callable[[list[int]], torch.Tensor], prompt: Sequence[int], new: int) -> list[int]:
    """Greedy by its definition: scores of the whole sequence again for every token."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(scores(ids).argmax()))
    return ids[len(prompt) :]
