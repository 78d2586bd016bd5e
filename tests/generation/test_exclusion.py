"""No id that was excluded is ever returned: rows that nothing may follow are an error, found as soon as it can be."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.generation import History
from lamina.generation.settings.settings import settings_of
from lamina.generation.strategies import dola
from lamina.model import Model
from lamina.sampling.chain import Facts, chain_of
from lamina.sampling.exclusion import may_exclude_all
from tests.families.harness import pair

PROMPTS = [[5, 9, 12], [7]]
NEW = 6
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": dict(do_sample=True, seed=1, renormalize_logits=True),
    "beams": dict(num_beams=2),
    "sampled beams": dict(num_beams=2, do_sample=True, seed=1),
    "prompt lookup": dict(prompt_lookup_num_tokens=2),
    "assisted": dict(assistant_early_exit=1, do_sample=True, seed=1, num_assistant_tokens=2),
    "contrastive": dict(penalty_alpha=0.5, top_k=4),
    "dola": dict(dola_layers="low"),
    "finite scores": dict(remove_invalid_values=True),
}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def model() -> Model:
    return pair("gemma2", "sliding and full in turn")[1]


def all_but(model: Model, *ids: int) -> list[int]:
    return [id for id in range(model.vocab) if id not in ids]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(suppress_tokens=range(67)), "suppress_tokens excludes all 67 ids: leave at least one"),
        (dict(bad_words_ids=[[id] for id in range(67)]), "bad_words_ids excludes all 67 ids"),
        (
            dict(suppress_tokens=range(40), bad_words_ids=[[id] for id in range(40, 67)]),
            "suppress_tokens and bad_words_ids together exclude all 67 ids",
        ),
        (
            dict(suppress_tokens=range(66), begin_suppress_tokens=66),
            "suppress_tokens and begin_suppress_tokens together exclude all 67 ids as the first new token",
        ),
        (
            dict(suppress_tokens=range(66), eos_token_id=66, min_new_tokens=2),
            "suppress_tokens excludes every id but end tokens, and min_new_tokens=2 wants others first",
        ),
        (
            dict(suppress_tokens=range(66), eos_token_id=66, min_length=2),
            "suppress_tokens excludes every id but end tokens, and min_length=2 wants others first",
        ),
    ],
)
def test_settings_that_exclude_everything_are_refused_before_a_cache_changes(
    model: Model, settings: dict[str, Any], message: str
) -> None:
    cache = model.new_cache(2)
    with pytest.raises(InputError, match=re.escape(message)):
        model.generate(PROMPTS, NEW, cache=cache, **dict(eos_token_id=()) | settings)
    assert cache.tokens == [[], []]


def test_settings_that_leave_one_id_give_that(model: Model) -> None:
    for settings in (dict(suppress_tokens=all_but(model, 66)), dict(bad_words_ids=[[id] for id in all_but(model, 66)])):
        assert model.generate(PROMPTS, 3, eos_token_id=(), **settings).tokens == [[66] * 3] * 2
    ends = model.generate([[5, 9, 12]], 3, suppress_tokens=range(66), eos_token_id=66, min_length=3)
    assert (ends.tokens, ends.reasons) == ([[66]], ["eos"])


@every_way
def test_a_row_that_runs_out_of_ids_is_an_error_that_names_what_excludes(model: Model, way: str) -> None:
    message = r"nothing may follow the tokens of row \d: no_repeat_ngram_size and suppress_tokens together exclude"
    with pytest.raises(InputError, match=message):
        model.generate(
            PROMPTS, NEW, eos_token_id=(), suppress_tokens=all_but(model, 1, 2, 3), no_repeat_ngram_size=1, **WAYS[way]
        )


@every_way
def test_as_long_as_ids_are_left_only_those_are_taken(model: Model, way: str) -> None:
    result = model.generate(
        PROMPTS, 3, eos_token_id=(), suppress_tokens=all_but(model, 1, 2, 3), no_repeat_ngram_size=1, **WAYS[way]
    )
    assert [sorted(row) for row in result.tokens] == [[1, 2, 3]] * 2


def nothing(scores: Tensor, history: History) -> Tensor:
    return torch.full_like(scores, -torch.inf)


@every_way
def test_a_processor_of_the_caller_s_that_excludes_everything_is_named(model: Model, way: str) -> None:
    with pytest.raises(InputError, match=r"row 0: logits_processor nothing excludes every id"):
        model.generate(PROMPTS, NEW, eos_token_id=(), logits_processor=nothing, **WAYS[way])


def test_bad_words_are_never_returned_whatever_else_allows_them(model: Model) -> None:
    def only_three(row: int, tokens: Tensor) -> list[int]:
        return [3]

    given: dict[str, Any] = dict(prefix_allowed_tokens_fn=only_three, eos_token_id=())
    with pytest.raises(InputError, match="prefix_allowed_tokens_fn and bad_words_ids together exclude every id"):
        model.generate(PROMPTS, 2, bad_words_ids=[[3]], **given)
    with pytest.raises(InputError, match="prefix_allowed_tokens_fn and bad_words_ids together exclude every id"):
        model.generate(PROMPTS, 2, bad_words_ids=[[3, 3]], **given)
    assert model.generate(PROMPTS, 1, bad_words_ids=[[3, 3]], **given).tokens == [[3], [3]]


def test_contrastive_search_takes_no_candidate_that_was_excluded(model: Model) -> None:
    """Fewer ids are allowed than there are candidates, and the most different one would win."""
    for row in range(8):
        result = model.generate(
            [[row, 5]], 4, eos_token_id=(), penalty_alpha=1.0, top_k=6, suppress_tokens=all_but(model, row, 5)
        )
        assert set(result.tokens[0]) <= {row, 5}


def test_dola_goes_on_where_every_plausible_token_is_banned(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the best token of the last layer is plausible, and it is an end token that may not come yet."""
    monkeypatch.setattr(dola, "RELATIVE_TOP", 1.0)
    likely = model.generate(PROMPTS, 1, eos_token_id=()).tokens[0][0]
    given: dict[str, Any] = dict(max_new_tokens=3, eos_token_id=likely, min_new_tokens=3)
    assert model.generate(PROMPTS, dola_layers=[1], **given).tokens == model.generate(PROMPTS, **given).tokens


def test_what_excludes_nothing_is_never_looked_at(model: Model) -> None:
    def chain(**given: Any) -> Any:
        return chain_of(settings_of(model, dict(eos_token_id=2) | given), Facts(model.vocab))

    harmless: dict[str, Any] = dict(
        do_sample=True, temperature=0.7, top_k=9, top_p=0.9, min_p=0.1, top_h=0.5, typical_p=0.5, epsilon_cutoff=0.1,
        eta_cutoff=0.1, repetition_penalty=1.2, presence_penalty=1.0, encoder_repetition_penalty=1.1, min_length=3,
        sequence_bias={(3,): 1.0, (3, 4): -9.0}, exponential_decay_length_penalty=(2, 1.1),
        remove_invalid_values=True, renormalize_logits=True, watermarking_config={}, forced_bos_token_id=3,
        forced_eos_token_id=2,
    )  # fmt: skip
    assert len(chain(**harmless)) == 19 and not may_exclude_all(chain(**harmless))
    for given in (
        dict(suppress_tokens=[1]), dict(begin_suppress_tokens=[1]), dict(bad_words_ids=[[1]]),
        dict(bad_words_ids=[[1, 2]]),
        dict(no_repeat_ngram_size=2), dict(encoder_no_repeat_ngram_size=2), dict(logits_processor=nothing),
        dict(prefix_allowed_tokens_fn=lambda row, tokens: [1]),
    ):  # fmt: skip
        assert may_exclude_all(chain(**given))
