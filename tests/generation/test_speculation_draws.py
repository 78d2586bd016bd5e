"""Tokens drawn with drafts have the distribution of the model alone, and depend on no neighbour."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.generation.stopping import Stopping
from lamina.generation.strategies.plain import decode_plain
from lamina.generation.strategies.speculation import accept_or_replace, speculate
from lamina.model import Model
from lamina.sampling.chooser import Chooser
from lamina.sampling.history import History
from tests.generation.drafted import PROMPTS, Oracle, again, begin, like, model_of, same, settings, tiny


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
def test_guesses_without_chance_leave_every_draw_as_it_is(family: str) -> None:
    warm = lambda scores, history: scores * 2  # noqa: E731
    run = begin(model_of(family), PROMPTS, 20, chooser=Chooser((warm,), sample=True, seed=3))
    truth = decode_plain(again(run))
    same(speculate(again(run, prompt_lookup_num_tokens=3, max_matching_ngram_size=1)), truth, run)
    found = speculate(again(run), Oracle(run, truth, 0.8))
    same(found, truth, run)
    assert found.more["speculation"].acceptance_rate > 0.5


def scaled(scores: Tensor, history: History) -> Tensor:
    """Sharper, and less likely the more often it has been: what a chooser's processors do to both distributions."""
    return scores * 1.3 - 0.3 * history.seen(scores.shape[-1])


def joint(model: Model, prompt: list[int], n: int) -> dict[tuple[int, ...], float]:
    """The probability of every way to go on for n tokens, from uncached passes."""
    ways = list(product(range(model.vocab), repeat=n))
    ids = torch.tensor([[*prompt, *way] for way in ways])
    logits = model(ids)
    assert logits is not None
    log_p = torch.zeros(len(ways))
    for k in range(n):
        before = ids[:, : len(prompt) + k]
        lengths = torch.full((len(ways),), before.shape[1])
        scores = scaled(logits[:, len(prompt) + k - 1].float(), History(lengths, lengths, before))
        log_p += scores.log_softmax(dim=-1).gather(1, ids[:, len(prompt) + k, None])[:, 0]
    return dict(zip(ways, log_p.exp().tolist(), strict=True))


def fits(found: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> bool:
    """Pearson's chi-square at one in a thousand, by Wilson and Hilferty's approximation; rare ways count as one."""
    counts, n = Counter(found), len(found)
    assert abs(sum(expected.values()) - 1) < 1e-4 and set(counts) <= set(expected)
    often = [(counts[way], n * p) for way, p in expected.items() if n * p >= 8]
    rare = [(counts[way], n * p) for way, p in expected.items() if n * p < 8]
    cells = [*often, (sum(c for c, _ in rare), sum(p for _, p in rare) + 1e-9)]
    chi, free = sum((c - p) ** 2 / p for c, p in cells), len(cells) - 1
    return chi < free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3


@pytest.mark.parametrize("changes", [{}, {"assistant_confidence_threshold": 0.4}, {"num_assistant_tokens": 1}], ids=str)
def test_tokens_drawn_with_an_assistant_have_the_models_distribution(changes: dict[str, Any]) -> None:
    model, assistant, prompt, rows, n = tiny(0), tiny(1), [1, 3, 0], 3000, 4
    one = begin(model, [prompt], n)
    run = replace(
        one, cache=one.cache.repeat(rows), logits=one.logits.expand(rows, -1), prompt_lengths=[len(prompt)] * rows,
        row_ids=list(range(rows)), chooser=Chooser((scaled,), sample=True, seed=11), stopping=Stopping([n] * rows),
        settings=settings(max_new_tokens=n, assistant_model=assistant, **{"num_assistant_tokens": 3} | changes),
    )  # fmt: skip
    made = speculate(run)
    expected = joint(model, prompt, n)
    assert fits([tuple(row) for row in made.tokens], expected)
    assert 0.2 < made.more["speculation"].acceptance_rate < 0.95
    assert not fits([tuple(row) for row in made.tokens], joint(assistant, prompt, n))  # the test would notice


def test_a_place_is_settled_by_the_models_distribution_whatever_the_guess_was_drawn_from() -> None:
    torch.manual_seed(0)
    N, V = 20000, 6
    numbers, positions = torch.arange(N), torch.full((N,), 5)
    chooser = Chooser(sample=True, seed=2)
    for p, q in (
        (torch.randn(V), torch.randn(V)),
        (torch.randn(V), torch.randn(V) * 5),
        (torch.tensor([0, 1, 2, -torch.inf, 0, 1]), torch.tensor([-torch.inf, 3, -torch.inf, 3, 0, 0])),
        (torch.zeros(V), torch.zeros(V)),
    ):
        scores, drawn = p.expand(N, V), q.expand(N, V)
        guesses = chooser.choose(drawn, numbers, positions, 1)
        for given in (guesses, torch.where(numbers % 2 == 0, guesses, -1)):
            found, right = accept_or_replace(chooser, scores, given, drawn, numbers, positions)
            assert bool((found == given)[right].all())
            there = p.exp() > 0
            expected = {(id,): float(p.softmax(-1)[id]) for id in range(V) if there[id]}
            assert fits([(id,) for id in found.tolist()], expected)
        overlap = float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum())
        assert (
            abs(
                float(accept_or_replace(chooser, scores, guesses, drawn, numbers, positions)[1].float().mean())
                - overlap
            )
            < 0.02
        )


def test_a_row_alone_draws_what_it_draws_in_a_batch() -> None:
    model = model_of("qwen3_next")
    changes = dict(assistant_model=like(model, 0.2), assistant_confidence_threshold=0.02)
    run = begin(model, PROMPTS, 14, chooser=Chooser(sample=True, seed=5))
    together = speculate(again(run, num_assistant_tokens_schedule="heuristic", **changes))
    for row, prompt in enumerate(PROMPTS):
        alone = begin(model, [prompt], 14, chooser=run.chooser, num_assistant_tokens_schedule="heuristic", **changes)
        made = speculate(replace(alone, row_ids=[row]))
        assert made.tokens[0] == together.tokens[row]
        assert made.more["speculation"] == together.more["speculation"].row(row)
