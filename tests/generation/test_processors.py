"""Every processor against the class of transformers that does the same, row by row, over ragged random histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from lamina.sampling import bans
from lamina.sampling.bans import ban_ngrams
from lamina.sampling.chain import Facts, chain_of, endings_of, need_tokens, processors_of
from lamina.sampling.guidance import guide_scores
from lamina.sampling.history import History, Processor
from tests.generation.histories import VOCAB, asked, history_of, random_history, random_scores, row_by_row

FACTS = Facts(VOCAB)
BIASES = [[[3], -2.5], [[5, 7], 4.0], [[1, 2, 3], 1.5], [[0, 7], -1.0], [[7], 0.25]]
WORDS = [[4], [9], [2, 8], [1, 1], [6, 5, 4], [11, 3]]


def listed(row: int, ids: Tensor) -> list[int]:
    """Allowed tokens that depend on the row and on all that it holds."""
    return [int(ids.sum()) % VOCAB, len(ids) % VOCAB, (row + 3) % VOCAB]


Theirs = Callable[[int, Tensor], Any]
CASES: dict[str, tuple[dict[str, Any], Theirs]] = {
    "repetition": ({"repetition_penalty": 1.3}, lambda n, ids: theirs.RepetitionPenaltyLogitsProcessor(1.3)),
    "repetition, rewarded": ({"repetition_penalty": 0.8}, lambda n, ids: theirs.RepetitionPenaltyLogitsProcessor(0.8)),
    "encoder repetition of the prompt": (
        {"encoder_repetition_penalty": 1.7},
        lambda n, ids: theirs.EncoderRepetitionPenaltyLogitsProcessor(1.7, ids),
    ),
    **{
        f"no repeated {size}-gram": (
            {"no_repeat_ngram_size": size},
            lambda n, ids, size=size: theirs.NoRepeatNGramLogitsProcessor(size),
        )
        for size in (1, 2, 3, 5)
    },
    **{
        f"no {size}-gram of the prompt": (
            {"encoder_no_repeat_ngram_size": size},
            lambda n, ids, size=size: theirs.EncoderNoRepeatNGramLogitsProcessor(size, ids),
        )
        for size in (1, 2, 3)
    },
    "sequence bias": ({"sequence_bias": BIASES}, lambda n, ids: theirs.SequenceBiasLogitsProcessor(BIASES)),
    "bias of single ids": (
        {"sequence_bias": {(3,): -2.5, (7,): 0.5}},
        lambda n, ids: theirs.SequenceBiasLogitsProcessor({(3,): -2.5, (7,): 0.5}),
    ),
    "bad words": (
        {"bad_words_ids": WORDS, "eos_token_id": 9},
        lambda n, ids: theirs.NoBadWordsLogitsProcessor(WORDS, 9),
    ),
    "min length": (
        {"min_length": 7, "eos_token_id": [2, 5]},
        lambda n, ids: theirs.MinLengthLogitsProcessor(7, [2, 5]),
    ),
    "min new tokens": (
        {"min_new_tokens": 4, "eos_token_id": 3},
        lambda n, ids: theirs.MinNewTokensLengthLogitsProcessor(n, 4, 3),
    ),
    "forced first": ({"forced_bos_token_id": 6}, lambda n, ids: theirs.ForcedBOSTokenLogitsProcessor(6)),
    "forced last by new tokens": (
        {"forced_eos_token_id": 6, "max_new_tokens": 5, "max_length": 3},
        lambda n, ids: theirs.ForcedEOSTokenLogitsProcessor(n + 5, 6),
    ),
    "forced last by length": (
        {"forced_eos_token_id": [6, 2], "max_length": 8},
        lambda n, ids: theirs.ForcedEOSTokenLogitsProcessor(8, [6, 2]),
    ),
    "suppress": ({"suppress_tokens": [0, 4, 22]}, lambda n, ids: theirs.SuppressTokensLogitsProcessor([0, 4, 22])),
    "suppress at begin": (
        {"begin_suppress_tokens": [0, 4]},
        lambda n, ids: theirs.SuppressTokensAtBeginLogitsProcessor([0, 4], n),
    ),
    "remove invalid": ({"remove_invalid_values": True}, lambda n, ids: theirs.InfNanRemoveLogitsProcessor()),
    "renormalize": ({"renormalize_logits": True}, lambda n, ids: theirs.LogitNormalization()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_processor_gives_what_transformers_gives(case: str) -> None:
    given, other = CASES[case]
    for seed in range(25):
        history, scores = random_history(seed), random_scores(seed)
        (processor,) = chain_of(asked(**given), FACTS)
        before = scores.clone()
        found = processor(scores, history)
        assert torch.equal(found, row_by_row(other, scores, history))
        assert torch.equal(scores, before)


def test_length_decay_gives_what_transformers_gives() -> None:
    for seed in range(25):
        history, scores = random_history(seed), random_scores(seed)
        (decay,) = chain_of(asked(exponential_decay_length_penalty=(2, 1.15), eos_token_id=[2, 5]), FACTS)
        found = decay(scores, history)
        expected = row_by_row(
            lambda n, ids: theirs.ExponentialDecayLengthPenalty((2, 1.15), [2, 5], n), scores, history
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_length_decay_far_past_its_start_is_still_a_number() -> None:
    (decay,) = chain_of(asked(exponential_decay_length_penalty=(0, 3.0), eos_token_id=[1, 2]), FACTS)
    scores = torch.zeros(1, VOCAB).index_fill_(1, torch.tensor([1]), -4.0)
    history = History(torch.tensor([5000]), torch.tensor([1]), None, None)
    assert not decay(scores, history).isnan().any() and decay(scores, history).argmax() == 1


def test_where_no_length_is_given_the_twentieth_token_is_forced() -> None:
    (last,) = chain_of(asked(forced_eos_token_id=(6,)), FACTS)
    history = history_of([[1], [1, 2, 3], [1]], [[4] * 18, [4] * 19, [4] * 20])
    found = last(random_scores(0, rows=3, banned=False), history)
    assert (found.isfinite().sum(dim=-1) == torch.tensor([VOCAB, 1, VOCAB])).all() and found[1].argmax() == 6


def test_suppress_at_begin_waits_for_a_forced_first_token() -> None:
    """Prompts of one token have the forced one first, so their second new token is the first that is chosen."""
    for seed in range(25):
        history, scores = random_history(seed, longest=3), random_scores(seed)
        _, processor = processors_of(asked(begin_suppress_tokens=[1, 2], forced_bos_token_id=4), FACTS)
        expected = row_by_row(
            lambda n, ids: theirs.SuppressTokensAtBeginLogitsProcessor([1, 2], n if n > 1 else n + 1), scores, history
        )
        assert torch.equal(processor(scores, history), expected)


def each_its_own(others: list[Any], scores: Tensor, history: History) -> Tensor:
    left = iter(others)
    return row_by_row(lambda n, ids: next(left), scores, history)


def test_an_encoders_ids_are_the_source_where_there_is_an_encoder() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(10):
        history, scores = random_history(seed), random_scores(seed)
        sizes = torch.randint(1, 12, (6,), generator=generator).tolist()
        sources = [torch.randint(0, VOCAB, (n,), generator=generator) for n in sizes]
        history.sources = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=-1)
        first, second = processors_of(asked(encoder_repetition_penalty=0.6, encoder_no_repeat_ngram_size=2), FACTS)
        others = [theirs.EncoderRepetitionPenaltyLogitsProcessor(0.6, source[None]) for source in sources]
        expected = each_its_own(others, scores, history)
        assert torch.equal(first(scores, history), expected)
        others = [theirs.EncoderNoRepeatNGramLogitsProcessor(2, source[None]) for source in sources]
        expected = each_its_own(others, scores, history)
        assert torch.equal(second(scores, history), expected)


def test_ids_that_the_model_cannot_give_are_passed_over() -> None:
    """A model may be fed more ids than it has scores for."""
    history = history_of([[1, 30, 2, 30]], [[1, 30]])
    scores = random_scores(0, rows=1, banned=False)
    for given, other in (CASES["repetition"], CASES["no repeated 2-gram"]):
        (processor,) = chain_of(asked(**given), FACTS)
        assert torch.equal(processor(scores, history), row_by_row(other, scores, history))


def test_tokens_without_an_id_equal_nothing() -> None:
    """A prompt of embeddings has no ids: only what was made since repeats."""
    hidden = history_of([[-1, -1, -1]], [[4, 5, 4]])
    plain = history_of([[20, 21, 22]], [[4, 5, 4]])
    scores = random_scores(1, rows=1, banned=False)
    for given in ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 3}, {"bad_words_ids": [[4, 6]]}):
        (processor,) = chain_of(asked(**given), FACTS)
        assert torch.equal(processor(scores, hidden), processor(scores, plain))
    (penalty,) = chain_of(asked(repetition_penalty=2.0), FACTS)
    assert (penalty(scores, hidden) != scores)[0].nonzero()[:, 0].tolist() == [4, 5]


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_a_function_that_lists_what_is_allowed(beams: int) -> None:
    for seed in range(10):
        history, scores = random_history(seed), random_scores(seed)
        assert history.tokens is not None
        (processor,) = chain_of(asked(prefix_allowed_tokens_fn=listed, num_beams=beams), FACTS)
        found = processor(scores, history)
        for at in range(0, 6, beams):
            group = range(at, at + beams)
            allowed = torch.full((beams, VOCAB), -torch.inf)
            for r in group:
                allowed[r - at, listed(at // beams, history.tokens[r, : history.lengths[r]])] = 0
            expected = scores[at : at + beams] + allowed
            dead = bool(expected.isneginf().all())
            assert torch.equal(found[at : at + beams], allowed if dead else expected)


def test_a_function_that_lists_what_is_allowed_gives_what_transformers_gives() -> None:
    for beams in (1, 2):
        tokens = torch.randint(0, VOCAB, (6, 7), generator=torch.Generator().manual_seed(beams))
        history = History(torch.full((6,), 7), torch.full((6,), 3), tokens, None)
        scores = random_scores(beams)
        scores[:2] = -torch.inf
        (processor,) = chain_of(asked(prefix_allowed_tokens_fn=listed, num_beams=beams), FACTS)
        other = theirs.PrefixConstrainedLogitsProcessor(listed, beams)
        assert torch.equal(processor(scores, history), other(tokens, scores))


def test_a_function_is_told_the_rows_own_number() -> None:
    seen: list[tuple[int, list[int]]] = []

    def function(row: int, ids: Tensor) -> list[int]:
        seen.append((row, ids.tolist()))
        return [0]

    history = history_of([[1], [2, 3]], [[], [4]])
    history.rows = [5, 2]
    (processor,) = chain_of(asked(prefix_allowed_tokens_fn=function), FACTS)
    processor(random_scores(0, rows=2), history)
    assert seen == [(5, [1]), (2, [2, 3, 4])]


@pytest.mark.parametrize("given", [(0.7, 0.0), (0.0, 1.1), (0.4, -0.3)])
def test_frequency_and_presence_follow_their_definition_over_new_tokens(given: tuple[float, float]) -> None:
    frequency, presence = given
    (processor,) = chain_of(asked(frequency_penalty=frequency, presence_penalty=presence), FACTS)
    for seed in range(10):
        history, scores = random_history(seed), random_scores(seed)
        assert history.tokens is not None
        expected = scores.clone()
        for r in range(6):
            new = history.tokens[r, history.prompts[r] : history.lengths[r]].tolist()
            for id in set(new):
                expected[r, id] -= frequency * new.count(id) + presence
        torch.testing.assert_close(processor(scores, history), expected)


def test_the_prompts_share_counts_only_when_asked_for() -> None:
    from lamina.sampling.penalties import Occurrence

    history, scores = history_of([[1, 2, 2]], [[2, 3]]), torch.zeros(1, 5)
    assert Occurrence(1.0, 10.0)(scores, history).tolist() == [[0, 0, -11, -11, 0]]
    assert Occurrence(1.0, 10.0, prompt=True)(scores, history).tolist() == [[0, -11, -13, -11, 0]]


@pytest.mark.parametrize("case", [*CASES, "occurrence", "decay"])
def test_what_needs_no_tokens_works_with_counts_alone(case: str) -> None:
    extra = {
        "occurrence": {"frequency_penalty": 0.5, "presence_penalty": 0.25},
        "decay": {"exponential_decay_length_penalty": (1, 1.2), "eos_token_id": 3},
    }
    (processor,) = chain_of(asked(**(extra[case] if case in extra else CASES[case][0])), FACTS)
    history, scores = random_history(4), random_scores(4)
    counts, share = history.seen(VOCAB), history.seen_in_prompt(VOCAB)
    bare = History(history.lengths, history.prompts, None, counts, prompt_counts=share)
    if not need_tokens([processor]):
        assert torch.equal(processor(scores, bare), processor(scores, history))
    else:
        assert any(word in case for word in ("gram", "sequence", "words")), case


def test_guidance_gives_what_transformers_gives() -> None:
    scores, negative = random_scores(1, banned=False), random_scores(2, banned=False)

    def model(ids: Tensor, **given: Any) -> Any:
        return type("Out", (dict,), {"logits": negative[:, None]})()

    for scale in (1.5, 0.5, -1.0):
        other = theirs.UnbatchedClassifierFreeGuidanceLogitsProcessor(scale, model)
        expected = other(torch.zeros(6, 2, dtype=torch.int64), scores)
        torch.testing.assert_close(guide_scores(scores, negative, scale), expected, rtol=1e-6, atol=1e-5)


def test_callers_own_come_before_the_filters_and_take_the_place_of_their_kind() -> None:
    from lamina.sampling.filters import TopK
    from lamina.sampling.penalties import Repetition

    def mine(scores: Tensor, history: History) -> Tensor:
        return scores + 1

    own: list[Processor] = [mine, Repetition(3.0)]
    settings = asked(repetition_penalty=1.2, suppress_tokens=[1], logits_processor=own, do_sample=True, top_k=3)
    settings.renormalize_logits = True
    chain = chain_of(settings, FACTS)
    assert chain[0] == Repetition(3.0) and chain[2] is mine and chain[3] == TopK(3)
    assert [type(one).__name__ for one in chain[1::3]] == ["Suppress", "Renormalize"]
    assert need_tokens([mine]) and not need_tokens(endings_of(settings, FACTS))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_row_of_exactly_one_n_gram_may_not_repeat_it(n: int) -> None:
    """The shortest row that holds an n-gram at all, and one that is a token too short."""
    for given in ({"no_repeat_ngram_size": n}, {"encoder_no_repeat_ngram_size": n}):
        (processor,) = chain_of(asked(**given), FACTS)
        found = processor(torch.zeros(1, VOCAB), history_of([[7] * n], [[]]))
        assert found[0].isneginf().nonzero().tolist() == [[7]]
        if n > 1:
            assert not processor(torch.zeros(1, VOCAB), history_of([[7] * (n - 1)], [[]])).isneginf().any()


@pytest.mark.parametrize("given", ["no_repeat_ngram_size", "encoder_no_repeat_ngram_size"])
def test_n_grams_longer_than_the_rows_cost_nothing(given: str) -> None:
    (processor,) = chain_of(asked(**{given: 2**31 - 1}), FACTS)
    scores = random_scores(0)
    assert torch.equal(processor(scores, random_history(0)), scores)


def test_long_n_grams_are_found_in_little_memory_as_short_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 2, 3, 70, 150):
        row = [1, 2] * 200
        history = history_of([row, [3, *row[1:]], [4] * 9 + row[:-10]], [[], [], [5]])
        scores = random_scores(1, rows=3)
        expected = ban_ngrams(scores, history.ids, n, history)
        assert expected.isneginf().sum() > scores.isneginf().sum()
        with monkeypatch.context() as patch:
            patch.setattr(bans, "COMPARED_AT_ONCE", 0)
            assert torch.equal(ban_ngrams(scores, history.ids, n, history), expected)
    long = history_of([list(range(20)) * 1000], [[]])  # compared in one piece this would take 100 million places
    assert int(ban_ngrams(torch.zeros(1, VOCAB), long.ids, 10_000, long).isneginf().sum()) == 1
