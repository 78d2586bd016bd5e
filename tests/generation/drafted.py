"""Runs that are decoded with drafts and without, for tests: models, prompts, and drafts with as much luck as wished."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig

from lamina.config import Config
from lamina.generation.prompt import from_rows
from lamina.generation.run import Run, StrategyOutput
from lamina.generation.stopping import Stopping
from lamina.generation.strategies.drafts import Draft
from lamina.model import Model
from lamina.models.llama import Llama
from lamina.sampling.chooser import Chooser
from tests.families.cases import FIRST
from tests.families.harness import pair, random_ids
from tests.families.test_t5 import pair as t5_pair

FAMILIES = [family for family, _ in FIRST]
PROMPTS = [[5, 9, 12, 3, 44, 8, 21, 9, 12], [7], [30, 31, 32]]


def settings(**changes: Any) -> Any:
    default: dict[str, Any] = dict(
        max_new_tokens=None, max_length=None, prefill_chunk=None, assistant_model=None, prompt_lookup_num_tokens=None,
        max_matching_ngram_size=2, assistant_early_exit=None, num_assistant_tokens=4,
        num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0, target_lookbehind=10,
        assistant_lookbehind=10, beyond_context=False,
    )  # fmt: skip
    return SimpleNamespace(**default | changes)


def begin(model: Model, prompts: list[list[int]], new: int, eos: tuple[int, ...] = (), **more: Any) -> Run:
    """A run after its prompts; models with an encoder read them as their sources."""
    prompt, source = from_rows(prompts), None
    capacity = more.pop("capacity", None)
    chooser = more.pop("chooser", Chooser())
    with torch.no_grad():
        cache = model.new_cache(len(prompts), capacity)
        if model.start_ids:
            cache.attach(model.encode(prompt.ids, prompt.counts))
            source = prompt.ids.masked_fill(
                torch.arange(prompt.ids.shape[1]) >= torch.tensor(prompt.counts)[:, None], -1
            )
            prompt = from_rows([[*model.start_ids, *row[:2]] for row in prompts])
        logits = model(prompt.ids, cache=cache, counts=prompt.counts, logits="last")
    assert logits is not None
    return Run(
        model, cache, logits, chooser, Stopping([new] * len(prompts), eos), prompt.counts, list(range(len(prompts))),
        settings(max_new_tokens=new, **more), source_ids=source,
    )  # fmt: skip


def again(run: Run, **changes: Any) -> Run:
    """The same run, with a cache of its own."""
    return replace(
        run,
        cache=run.cache.fork(),
        stopping=run.stopping.select(range(run.rows)),
        settings=settings(**vars(run.settings) | changes),
    )


def ragged(rows: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(67) for _ in range(rng.randint(1, 14))] for _ in range(rows)]


@functools.cache
def model_of(family: str) -> Model:
    return t5_pair("own head, few buckets, gated silu")[1] if family == "t5" else pair(family, dict(FIRST)[family])[1]


def like(model: Model, noise: float) -> Model:
    """Nearly the same model: its guesses are sometimes right."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    for parameter in other.parameters():
        parameter.add_(torch.randn_like(parameter) * noise * parameter.abs().mean())
    return other


class Oracle:
    """Knows what comes, and says it with probability `luck` (by row: the first again after the last); else something
    else."""

    def __init__(self, run: Run, truth: StrategyOutput, *luck: float) -> None:
        self.texts = [text + new for text, new in zip(run.cache.tokens, truth.tokens, strict=True)]
        self.luck, self.rng = luck, random.Random(0)

    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Draft:
        guesses = []
        for row, text, n in zip(rows, texts, most, strict=True):
            n = self.rng.randint(min(n, 1), n)  # ragged, as a draft may be
            coming = self.texts[row][len(text) : len(text) + n]
            luck = self.luck[row % len(self.luck)]
            guesses.append([t if self.rng.random() < luck else (t + 1) % 67 for t in coming])
        return Draft(guesses)


def same(found: StrategyOutput, truth: StrategyOutput, run: Run) -> None:
    """The same tokens, reasons and caches, which go on in the same way."""
    assert found.tokens == truth.tokens
    assert found.reasons == truth.reasons
    assert found.cache.tokens == truth.cache.tokens
    assert found.cache.tokens == [p + t for p, t in zip(run.cache.tokens, found.tokens, strict=True)]
    with torch.no_grad():
        ids = random_ids(found.cache.rows, 3, 67)
        logits, expected = (run.model(ids, cache=cache.fork()) for cache in (found.cache, truth.cache))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def tiny(seed: int, vocab: int = 4) -> Model:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
        vocab_size=vocab,
    )  # fmt: skip
    model = Llama.build(Config(config.to_dict()))
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.5)
    return model
