"""The rules for timestamps against transformers', and the segments that timestamps mark."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from lamina.audio.timestamps import Span, TimestampRules, spans_of
from lamina.sampling.history import History

VOCAB, FIRST, END = 60, 40, 30


def random_row(rng: random.Random, length: int) -> list[int]:
    """Text, special ids and timestamps in any order, but timestamps never decrease."""
    row, time = [], FIRST
    for _ in range(length):
        time = min(time + rng.choice([0, 1, 3]), VOCAB - 1)
        row.append(rng.choice([rng.randrange(FIRST), time, time]))
    return row


@pytest.mark.parametrize("latest", [None, 3])
def test_the_rules_are_those_of_transformers_also_from_counts_and_the_last_two_tokens(latest: int | None) -> None:
    rng = random.Random(0)
    rules = TimestampRules(FIRST, END, latest)
    said = SimpleNamespace(
        no_timestamps_token_id=FIRST - 1, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=latest
    )
    for new in [0, 0, 1, 1, 2, 3, 5, *(rng.randint(2, 12) for _ in range(30))]:
        prompt = random_row(rng, rng.randint(1, 4))
        ids = torch.tensor([prompt + random_row(rng, new)])
        scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(new)) * 3
        expected = WhisperTimeStampLogitsProcessor(said, begin_index=len(prompt))(ids, scores)
        lengths, prompts = torch.tensor([ids.shape[1]]), torch.tensor([len(prompt)])
        whole = History(lengths, prompts, torch.cat([ids, torch.full((1, 3), VOCAB - 1)], dim=1))
        assert torch.equal(rules(scores, whole), expected)
        counts, before = whole.seen(VOCAB), whole.seen_in_prompt(VOCAB)
        captured = History(lengths, prompts, None, counts, prompt_counts=before, recent=whole.tail(2))
        assert torch.equal(rules(scores, captured), expected)


@pytest.mark.parametrize(
    ("tokens", "spans", "frames"),
    [
        ([40, 1, 2, 45], [Span(0.0, 0.1, [40, 1, 2, 45])], 50),  # a single timestamp ends it: no speech after it
        ([40, 1, 45, 45, 2], [Span(0.0, 0.1, [40, 1, 45, 45])], 10),  # unfinished: what follows the pair is dropped
        ([40, 1, 45, 45, 2, 50], [Span(0.0, 0.1, [40, 1, 45]), Span(0.1, 0.2, [45, 2, 50])], 50),
        ([40, 1, 44, 46, 2, 50, 50], [Span(0.0, 0.08, [40, 1, 44]), Span(0.12, 0.2, [46, 2, 50, 50])], 20),
        ([40, 1, 2], [Span(0.0, 0.5, [40, 1, 2])], 50),  # no end: the whole window
        ([1, 2], [Span(0.0, 0.5, [1, 2])], 50),
        ([], [Span(0.0, 0.5, [])], 50),
    ],
)
def test_timestamps_mark_segments_and_where_the_next_window_begins(
    tokens: list[int], spans: list[Span], frames: int
) -> None:
    found, moved = spans_of(tokens, 50, FIRST)
    assert [one.tokens for one in found] == [one.tokens for one in spans] and moved == frames
    for one, other in zip(found, spans, strict=True):
        assert (one.start, one.end) == pytest.approx((other.start, other.end))
