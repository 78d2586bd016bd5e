"""The watermark: the green lists of transformers, and a detector that counts as its detector does."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, WatermarkDetector, WatermarkingConfig
from transformers.generation.logits_process import WatermarkLogitsProcessor

from lamina.errors import InputError
from lamina.sampling.history import History
from lamina.sampling.noise import draw
from lamina.sampling.watermark import Watermark, detect, watermark_of
from tests.generation.histories import random_history, random_scores, row_by_row

VOCAB = 90
CONFIGS: list[dict[str, Any]] = [
    {},
    {"greenlist_ratio": 0.5, "bias": 3.5, "hashing_key": 77},
    {"context_width": 3},
    {"seeding_scheme": "selfhash", "context_width": 1},
    {"seeding_scheme": "selfhash", "context_width": 4, "bias": 1.0, "greenlist_ratio": 0.4},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_same_ids_are_green_as_in_transformers(config: dict[str, Any]) -> None:
    watermark = watermark_of(config, VOCAB)
    other = WatermarkLogitsProcessor(VOCAB, "cpu", **config)
    for seed in range(4):
        history, scores = random_history(seed, vocab=VOCAB), random_scores(seed, vocab=VOCAB)
        before = scores.clone()
        found = watermark(scores, history)
        assert torch.equal(found, row_by_row(lambda n, ids: other, scores, history))
        assert torch.equal(scores, before)
        long = history.lengths >= watermark.context_width
        assert torch.equal((found != scores).any(dim=-1), long)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("once", [False, True])
def test_the_detector_counts_as_that_of_transformers(config: dict[str, Any], once: bool) -> None:
    ids = torch.randint(5, 20, (3, 60), generator=torch.Generator().manual_seed(1))  # few ids, so that pairs repeat
    other = WatermarkDetector(
        LlamaConfig(vocab_size=VOCAB), "cpu", WatermarkingConfig(**config), ignore_repeated_ngrams=once
    )(ids, return_dict=True)
    found = detect(ids.tolist(), watermark_of(WatermarkingConfig(**config), VOCAB), once)
    assert [one.scored for one in found] == other.num_tokens_scored.tolist()
    assert [one.green for one in found] == other.num_green_tokens.tolist()
    assert [one.z for one in found] == pytest.approx(other.z_score.tolist())
    assert [one.found() for one in found] == other.prediction.tolist()


@pytest.mark.parametrize("config", CONFIGS[:1] + CONFIGS[-1:], ids=str)
def test_marked_text_is_found_by_both_detectors_and_plain_text_by_none(config: dict[str, Any]) -> None:
    scores = 0.5 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    watermark = watermark_of({**config, "bias": 4.0}, VOCAB)
    texts = {}
    for marked in (True, False):
        ids = [7, 8, 9, 10]
        for _ in range(80):
            history = History(torch.tensor([len(ids)]), torch.tensor([4]), torch.tensor([ids]), None)
            changed = watermark(scores, history) if marked else scores
            ids.append(int(draw(changed, 3, torch.tensor([0]), history.lengths)))
        texts[marked] = ids[4:]
    other = WatermarkDetector(LlamaConfig(vocab_size=VOCAB), "cpu", WatermarkingConfig(**config))
    for marked, text in texts.items():
        (found,) = detect([text], watermark)
        assert found.found() == marked == bool(other(torch.tensor([text]))[0])
        assert (found.p < 1e-3) == marked


def test_p_is_the_upper_tail_of_the_normal_distribution() -> None:
    (found,) = detect([list(range(40))], Watermark(VOCAB))
    steps = torch.linspace(found.z, found.z + 12, 200_001, dtype=torch.float64)
    density = (-(steps**2) / 2).exp() / math.sqrt(2 * math.pi)
    assert found.p == pytest.approx(float(torch.trapezoid(density, steps)), rel=1e-6)


def test_ragged_rows_are_judged_each_by_itself() -> None:
    rows = [[1, 2, 3, 4], list(range(50)), [9, 9, 9]]
    watermark = Watermark(VOCAB, seeding_scheme="selfhash", context_width=2)
    assert detect(rows, watermark) == list(itertools.chain(*(detect([row], watermark) for row in rows)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seeding_scheme": "left"}, "seeding_scheme must be one of lefthash, selfhash, not 'left'"),
        ({"greenlist_ratio": 1.0}, "greenlist_ratio must be between 0 and 1, not 1.0"),
        ({"greenlist_ratio": "a"}, "watermarking_config: greenlist_ratio must be a number from 0 to 1, not 'a'"),
        (
            {"context_width": 0},
            "watermarking_config: context_width must be a whole number from 1 to 2.14748e+09, not 0",
        ),
        ({"context_width": 1.5}, "watermarking_config: context_width must be a whole number from 1 to"),
        ({"bias": float("nan")}, "watermarking_config: bias must be a number from -1e+09 to 1e+09, not nan"),
        ({"bias": float("inf")}, "watermarking_config: bias must be a number from -1e+09 to 1e+09, not inf"),
        ({"hashing_key": 2**64}, "watermarking_config: hashing_key must be a whole number from 0 to"),
        (5, "watermarking_config must be a mapping, as {'bias': 2.0}, not 5"),
        (
            {"ngram_len": 5},
            "watermarking_config has 'ngram_len'; a green-list watermark has greenlist_ratio, bias, hashing_key, "
            "seeding_scheme, context_width",
        ),
    ],
)
def test_other_watermarks_are_refused_in_words(config: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        watermark_of(config, VOCAB)
    assert str(caught.value).startswith(message)


def test_a_context_longer_than_the_rows_marks_nothing_and_costs_nothing() -> None:
    history, scores = random_history(0), random_scores(0)
    for scheme in ("lefthash", "selfhash"):
        watermark = Watermark(VOCAB, seeding_scheme=scheme, context_width=2**31 - 1)
        assert torch.equal(watermark(scores, history), scores)


def test_a_text_too_short_to_judge_is_named() -> None:
    with pytest.raises(InputError, match="row 0 must be a list of ids from 0 to 22, not "):
        detect([[1, 2, 999, 3]], Watermark(23))
    with pytest.raises(InputError, match="row 1 has 2 tokens; the watermark needs more than 2"):
        detect([[1, 2, 3], [4, 5]], Watermark(VOCAB, context_width=2))
