"""Every filter against the class of transformers that does the same, over random scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation import logits_process as theirs

from lamina.errors import InputError
from lamina.sampling.chain import Facts, apply, filters_of
from lamina.sampling.filters import Epsilon, Eta, MinP, Temperature, TopH, TopK, TopP, Typical
from lamina.sampling.history import Processor
from lamina.sampling.noise import draw
from tests.generation.histories import asked, history_of, random_scores
from tests.generation.statistics import chance

HISTORY = history_of([[1]] * 6, [[]] * 6)
FACTS = Facts(vocab=23)

CASES: list[tuple[Processor, Any]] = [
    (Temperature(0.3), theirs.TemperatureLogitsWarper(0.3)),
    (Temperature(1.7), theirs.TemperatureLogitsWarper(1.7)),
    *((TopH(h), theirs.TopHLogitsWarper(h)) for h in (0.1, 0.5, 0.9)),
    *((TopK(k, n), theirs.TopKLogitsWarper(k, min_tokens_to_keep=n)) for k, n in ((1, 1), (5, 1), (2, 4), (500, 1))),
    *(
        (TopP(p, n), theirs.TopPLogitsWarper(p, min_tokens_to_keep=n))
        for p, n in ((0.0, 1), (0.4, 1), (0.9, 1), (0.3, 5))
    ),
    *(
        (MinP(p, n), theirs.MinPLogitsWarper(p, min_tokens_to_keep=n))
        for p, n in ((0.0, 1), (0.1, 1), (1.0, 1), (0.7, 4))
    ),
    *((Typical(m, n), theirs.TypicalLogitsWarper(m, min_tokens_to_keep=n)) for m, n in ((0.2, 1), (0.9, 1), (0.1, 6))),
    *((Epsilon(e, n), theirs.EpsilonLogitsWarper(e, min_tokens_to_keep=n)) for e, n in ((0.02, 1), (0.9, 1), (0.5, 3))),
    *((Eta(e, n), theirs.EtaLogitsWarper(e, min_tokens_to_keep=n)) for e, n in ((0.01, 1), (0.3, 1), (0.99, 3))),
]


@pytest.mark.parametrize(("filter", "other"), CASES, ids=[str(ours) for ours, _ in CASES])
@pytest.mark.parametrize("vocab", [2, 23, 300])
def test_a_filter_keeps_what_transformers_keeps(filter: Processor, other: Any, vocab: int) -> None:
    for seed in range(6):
        scores = random_scores(seed, vocab=vocab, banned=seed % 2 == 1)
        before = scores.clone()
        found = filter(scores, HISTORY)
        assert torch.equal(found, other(None, scores.clone()))
        assert torch.equal(scores, before)
        alone = [filter(scores[r : r + 1], HISTORY) for r in range(6)]
        assert torch.equal(torch.cat(alone), found)


@pytest.mark.parametrize("filter", [ours for ours, _ in CASES], ids=str)
def test_something_is_always_left_also_of_equal_scores(filter: Processor) -> None:
    for scores in (torch.zeros(6, 9), torch.full((6, 9), -torch.inf).index_fill_(1, torch.tensor([4]), 1.0)):
        assert filter(scores, HISTORY).isfinite().any(dim=-1).all()


@pytest.mark.parametrize("filter", [ours for ours, _ in CASES if not isinstance(ours, TopH)], ids=str)
def test_scores_that_are_not_a_number_stay_visible(filter: Processor) -> None:
    assert filter(torch.full((1, 9), torch.nan), HISTORY).isnan().any()


def test_all_filters_together_in_the_order_of_transformers_and_draws_follow_what_is_left() -> None:
    settings = asked(do_sample=True, temperature=1.4, top_h=0.95, top_k=18, top_p=0.93, min_p=0.02, typical_p=0.96)
    settings.epsilon_cutoff, settings.eta_cutoff = 0.01, 0.02
    chain = filters_of(settings, FACTS)
    assert tuple(map(type, chain)) == (Temperature, TopH, TopK, TopP, MinP, Typical, Epsilon, Eta)
    others = [theirs.TemperatureLogitsWarper(1.4), theirs.TopHLogitsWarper(0.95), theirs.TopKLogitsWarper(18)]
    others += [theirs.TopPLogitsWarper(0.93), theirs.MinPLogitsWarper(0.02), theirs.TypicalLogitsWarper(0.96)]
    others += [theirs.EpsilonLogitsWarper(0.01), theirs.EtaLogitsWarper(0.02)]
    scores = random_scores(3, banned=False) / 2
    expected = scores
    for other in others:
        expected = other(None, expected)
    found = apply(scores, HISTORY, chain)
    torch.testing.assert_close(found, expected)
    n = 20_000
    for row in range(6):
        drawn = draw(found[row].expand(n, -1), 77, torch.full((n,), row), torch.arange(n)).bincount(minlength=23)
        assert 3 < (drawn > 0).sum() < 23 and (drawn[found[row].isneginf()] == 0).all()
        assert chance(drawn, expected[row].softmax(-1)) > 1e-3


def test_nothing_is_cut_away_without_sampling_or_by_neutral_settings() -> None:
    assert filters_of(asked(do_sample=False, top_k=50, temperature=0.5), FACTS) == []
    neutral = asked(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0
    )
    assert filters_of(neutral, FACTS) == []


@pytest.mark.parametrize(("ends", "keep"), [(None, 2), (5, 2), ([5, 6, 7], 4)])
def test_beam_sampling_keeps_an_id_besides_the_end_tokens(ends: Any, keep: int) -> None:
    settings = asked(do_sample=True, num_beams=3, top_k=1, top_p=0.1, min_p=0.9, eos_token_id=ends)
    assert filters_of(settings, FACTS) == [TopK(1, keep), TopP(0.1, keep), MinP(0.9, keep)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Temperature(1e-7),
            "temperature must be finite and at least 1e-06, not 1e-07; do_sample=False takes the best token",
        ),
        (
            lambda: Temperature(float("inf")),
            "temperature must be finite and at least 1e-06, not inf; do_sample=False takes the best token",
        ),
        (lambda: TopH(0.0), "top_h must be above 0 and at most 1, not 0.0"),
        (lambda: TopK(-1), "top_k must be at least 1, not -1; as a setting, 0 turns it off"),
        (lambda: TopP(1.5), "top_p must be from 0 to 1, not 1.5"),
        (lambda: MinP(-0.1), "min_p must be from 0 to 1, not -0.1"),
        (lambda: Typical(0.0), "typical_p must be between 0 and 1, not 0.0; as a setting, 1 turns it off"),
        (lambda: Epsilon(1.0), "epsilon_cutoff must be between 0 and 1, not 1.0; as a setting, 0 turns it off"),
        (lambda: Eta(2.0), "eta_cutoff must be between 0 and 1, not 2.0; as a setting, 0 turns it off"),
    ],
)
def test_values_outside_their_range_are_named(make: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == message
