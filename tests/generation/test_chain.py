"""Settings to processors: the whole chain against the list that transformers builds, and what is refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, WatermarkingConfig
from transformers.generation import logits_process as theirs

from lamina.errors import InputError
from lamina.sampling.chain import Facts, RemoveInvalid, apply, chain_of
from lamina.sampling.history import History
from lamina.sampling.noise import draw
from tests.generation.histories import VOCAB, asked, random_history, random_scores, row_by_row

FACTS = Facts(VOCAB)
ENDS = [2, 5]

EVERYTHING: dict[str, Any] = {
    "sequence_bias": [[[3], -2.5], [[5, 7], 4.0]],
    "encoder_repetition_penalty": 1.4,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[4], [2, 8]],
    "min_length": 6,
    "min_new_tokens": 3,
    "forced_bos_token_id": 6,
    "forced_eos_token_id": 2,
    "max_length": 12,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (4, 1.1),
    "suppress_tokens": [0],
    "begin_suppress_tokens": [9],
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 12,
    "top_p": 0.95,
    "min_p": 0.01,
    "typical_p": 0.97,
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.001,
    "renormalize_logits": True,
}


def build(given: dict[str, Any], length: int, prompt: Tensor, own: list[Any]) -> Any:
    """What transformers makes of the same settings, as its generate would ask for them."""
    config = GenerationConfig(**given, num_beams=1)
    config._eos_token_tensor = torch.tensor(ENDS)
    return model()._get_logits_processor(config, length, prompt, allowed, theirs.LogitsProcessorList(own), "cpu")


@functools.cache
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))


def allowed(row: int, ids: Tensor) -> list[int]:
    return [id for id in range(VOCAB) if (id + len(ids)) % 4]


def test_everything_at_once_is_what_transformers_makes_of_it() -> None:
    ours = {**EVERYTHING, "eos_token_id": ENDS, "prefix_allowed_tokens_fn": allowed, "num_beams": 1}
    ours["logits_processor"] = [lambda scores, history: scores * 0.5]
    ours["watermarking_config"] = WatermarkingConfig(bias=1.5, seeding_scheme="lefthash")
    chain = chain_of(asked(**ours), FACTS)
    assert len(chain) == 25
    half = type("Half", (theirs.LogitsProcessor,), {"__call__": lambda self, ids, scores: scores * 0.5})()
    given = {**EVERYTHING, "watermarking_config": ours["watermarking_config"]}
    for seed in range(12):
        history, scores = random_history(seed), random_scores(seed)
        found = apply(scores, history, chain)
        expected = row_by_row(lambda n, ids: build(copy.deepcopy(given), n, ids, [half]), scores, history)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "leave", [name for name in EVERYTHING if name not in ("max_length", "do_sample", "eta_cutoff")]
)
def test_each_setting_left_out_is_what_transformers_makes_of_the_rest(leave: str) -> None:
    given = {name: value for name, value in EVERYTHING.items() if name != leave}
    if leave == "top_k":
        given["top_k"] = 0
    chain = chain_of(asked(**given, eos_token_id=ENDS, prefix_allowed_tokens_fn=allowed), FACTS)
    for seed in range(2):
        history, scores = random_history(seed), random_scores(seed)
        found = apply(scores, history, chain)
        expected = row_by_row(lambda n, ids: build(given, n, ids, []), scores, history)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_settings_that_ask_for_nothing_change_nothing() -> None:
    neutral = asked(min_length=0, repetition_penalty=1.0, encoder_repetition_penalty=1.0, no_repeat_ngram_size=0)
    neutral.frequency_penalty, neutral.presence_penalty, neutral.encoder_no_repeat_ngram_size = 0.0, 0.0, 0
    neutral.remove_invalid_values, neutral.renormalize_logits, neutral.num_beams = False, False, 1
    assert chain_of(asked(), FACTS) == chain_of(neutral, FACTS) == []
    assert chain_of(asked(min_length=5, min_new_tokens=5, bad_words_ids=[[3]]), Facts(VOCAB)) != []
    assert chain_of(asked(min_length=5, bad_words_ids=[[2]], eos_token_id=2), FACTS)[1:] == []


def test_scores_that_are_no_numbers_are_put_right() -> None:
    scores = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    history = History(torch.tensor([1]), torch.tensor([1]), None, None)
    assert torch.equal(RemoveInvalid()(scores, history), theirs.InfNanRemoveLogitsProcessor()(None, scores))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, not 0.0; 1 changes nothing"),
        ({"encoder_repetition_penalty": -1}, "encoder_repetition_penalty must be above 0, not -1; 1 changes nothing"),
        (
            {"no_repeat_ngram_size": -2},
            "no_repeat_ngram_size must be at least 1, not -2; as a setting, 0 turns it off",
        ),
        (
            {"encoder_no_repeat_ngram_size": -2},
            "encoder_no_repeat_ngram_size must be at least 1, not -2; as a setting, 0 turns it off",
        ),
        ({"suppress_tokens": [3, 23]}, "suppress_tokens has the id 23; this model's ids are 0 to 22"),
        ({"min_length": 1, "eos_token_id": 99}, "eos_token_id has the id 99; this model's ids are 0 to 22"),
        ({"bad_words_ids": [[1, -4]]}, "bad_words_ids has the id -4; this model's ids are 0 to 22"),
        (
            {"bad_words_ids": [[1], []]},
            "bad_words_ids must name at least one sequence, each of at least one id, not [(1,), ()]",
        ),
        (
            {"sequence_bias": {3: 1.0}},
            "sequence_bias must map id sequences to numbers, as {(3, 5): -2.0} or [[[3, 5], -2.0]], not {3: 1.0}",
        ),
        (
            {"exponential_decay_length_penalty": (1, 1.1)},
            "exponential_decay_length_penalty raises the score of end tokens: give eos_token_id",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        chain_of(asked(**given), FACTS)
    assert str(caught.value) == message


def test_a_function_that_allows_nothing_is_refused() -> None:
    (processor,) = chain_of(asked(prefix_allowed_tokens_fn=lambda row, ids: []), FACTS)
    with pytest.raises(InputError, match="lists nothing for prompt 0 after 1 tokens"):
        processor(random_scores(0), random_history(0))
    for wrong in (None, ["a"], 5):
        (processor,) = chain_of(asked(prefix_allowed_tokens_fn=lambda row, ids, wrong=wrong: wrong), FACTS)
        with pytest.raises(InputError, match="prefix_allowed_tokens_fn must return a list of ids, not "):
            processor(random_scores(0), random_history(0))
    (processor,) = chain_of(asked(prefix_allowed_tokens_fn=lambda row, ids: [40]), FACTS)
    with pytest.raises(InputError, match="the id 40; this model's ids are 0 to 22"):
        processor(random_scores(0), random_history(0))


def test_tokens_are_asked_for_in_words_where_there_are_none() -> None:
    (processor,) = chain_of(asked(no_repeat_ngram_size=2), FACTS)
    with pytest.raises(InputError, match="this history has no tokens"):
        processor(torch.zeros(1, VOCAB), History(torch.tensor([1]), torch.tensor([1]), None, None))


def test_the_device_waits_for_nobody() -> None:
    """Tensors without contents: whatever asks for a number of theirs raises."""
    given = {**EVERYTHING, "eos_token_id": ENDS, "frequency_penalty": 1.0, "top_h": 0.5, "max_new_tokens": 4}
    facts = Facts(VOCAB, "meta")
    history = random_history(0)
    assert history.tokens is not None
    away = History(history.lengths.to("meta"), history.prompts.to("meta"), history.tokens.to("meta"), None)
    chain = chain_of(asked(**given), facts)
    assert apply(random_scores(0).to("meta"), away, chain).shape == (6, VOCAB)
    words = draw(random_scores(0).to("meta"), 1, away.lengths, away.lengths)
    assert words.shape == (6,)
