"""A strategy by itself: a run over prompts that are in, and what must hold of whatever it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.generation.prompt import from_rows
from lamina.generation.result import Recorder
from lamina.generation.run import Run, StrategyOutput
from lamina.generation.settings.settings import Settings
from lamina.generation.stopping import Stopping
from lamina.model import Model
from lamina.sampling.chain import Facts, chain_of
from lamina.sampling.chooser import Chooser

PROMPTS = [[5, 9, 12, 3, 44, 8, 21, 60, 2, 17], [7], [30, 31, 32]]


def run_of(
    model: Model, prompts: Sequence[Sequence[int]], cache: Cache | None = None, on_token: Any = None,
    row_ids: Sequence[int] | None = None, **values: Any,
) -> Run:  # fmt: skip
    """A run with these settings, and the processors that they ask for."""
    settings, prompt = Settings(**values), from_rows(prompts)
    chain = tuple(chain_of(settings, Facts(model.vocab)))
    cache = model.new_cache(len(prompts)) if cache is None else cache
    logits = model(prompt.ids, cache=cache, counts=prompt.counts, logits="last")
    assert logits is not None
    lengths = cache.clock.sync()
    return Run(
        model, cache, logits, Chooser(chain, settings.do_sample, settings.seed or 0),
        Stopping.of(settings, lengths, None), lengths, list(row_ids or range(len(prompts))), settings, on_token,
        recorder=Recorder.of(settings, len(prompts)),
    )  # fmt: skip


def assert_can_be_continued(model: Model, made: StrategyOutput, prompts: Sequence[Sequence[int]]) -> None:
    """The cache holds each sequence, and goes on from it as an uncached pass does."""
    each = len(made.tokens) // len(prompts)
    whole = [[*prompts[i // each], *tokens] for i, tokens in enumerate(made.tokens)]
    assert made.cache.tokens == whole
    more = [1, 2, 3]
    found = model([more] * len(whole), cache=made.cache, logits="last")
    expected = torch.cat([model([row + more], logits="last") for row in whole])  # type: ignore[misc]
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def argmax_of(scores: Callable[[list[int]], Tensor], prompt: Sequence[int], new: int) -> list[int]:
    """Greedy by its definition: scores of the whole sequence again for every token."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(scores(ids).argmax()))
    return ids[len(prompt) :]
