"""Speculation on captured passes makes the tokens of plain decoding, whatever its drafts are worth."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.generation.drafts import Assistant, Guess, draft_of
from lamina.generation.run import Chooser, one_by_one
from lamina.generation.speculation import speculate
from lamina.runtime.explain import why_no_kernels
from tests.generation.test_speculation import Oracle, again, begin, same
from tests.kernels.runs import small

PROMPTS = [[5, 9, 12, 3, 44, 9, 12], [7]]


@pytest.fixture(autouse=True)
def captured(few_programs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernels could do is done by them, as if the model were on a GPU."""
    reason = lambda model, cache: why_no_kernels(model.specs, cache.layers)  # noqa: E731
    monkeypatch.setattr("lamina.generation.reading.why_no_passes", reason)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2", "falcon_h1", "qwen3_next", "deepseek_v3"])
def test_drafts_right_sometimes_and_never_give_the_greedy_tokens(family: str) -> None:
    run = begin(small(family), PROMPTS, 4)
    truth = one_by_one(again(run))
    found = speculate(again(run, num_assistant_tokens=3), Oracle(run, truth, 0.7, 0))
    same(found, truth, run)
    assert found.how == "captured passes of several tokens"
    assert found.more["speculation"].row(0).acceptance_rate > found.more["speculation"].row(1).acceptance_rate == 0


@pytest.mark.parametrize("changes", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}], ids=str)
def test_tokens_drawn_are_those_of_plain_passes_with_the_same_seed(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = lambda scores, history: scores * 2 - history.seen(scores.shape[1])  # noqa: E731
    run = begin(small("gemma2"), PROMPTS, 4, chooser=Chooser((warm,), sample=True, seed=3), num_assistant_tokens=2)
    found = speculate(again(run, **changes))
    monkeypatch.setattr("lamina.generation.reading.why_no_passes", lambda model, cache: "of this test")
    plain = speculate(again(run, **changes))
    assert (found.tokens, found.more) == (plain.tokens, plain.more)
    assert found.how == "captured passes of several tokens"
    assert plain.how == "plain passes of several tokens, since of this test"


def test_an_assistants_passes_are_captured_too_and_an_exit_keeps_its_graphs() -> None:
    run = begin(small("gemma2"), PROMPTS[1:], 3)
    truth = one_by_one(again(run))
    captures = []
    for _ in range(2):
        run_with = again(run, assistant_early_exit=1, num_assistant_tokens=2)
        draft, schedule = draft_of(run_with)
        assert isinstance(draft, Assistant)
        assert speculate(run_with, draft, schedule).tokens == truth.tokens
        captures.append(draft.model.graphs.captures)
    assert captures[0] == captures[1] > 0


def test_a_recurrent_assistant_reads_by_plain_passes_and_says_why() -> None:
    run = begin(small("llama"), PROMPTS, 4)
    found = speculate(again(run, assistant_model=small("mamba2"), num_assistant_tokens=2))
    assert found.tokens == one_by_one(again(run)).tokens
    assert found.how == (
        "captured passes of several tokens; drafts by plain passes, since layer 0 entry 'state': its slack is 1; a "
        "captured step keeps no log of inputs to go back to"
    )


def test_drafts_are_as_long_as_a_captured_pass_has_room_for_and_may_always_be_right() -> None:
    run = begin(small("llama"), PROMPTS[1:], 20)
    truth = one_by_one(again(run))
    text = run.cache.tokens[0] + truth.tokens[0]
    right = lambda rows, texts, most: Guess([text[len(texts[0]) : len(texts[0]) + most[0]]])  # noqa: E731
    found = speculate(again(run, num_assistant_tokens=30), right)
    assert found.tokens == truth.tokens
    assert found.more["speculation"].drafted == found.more["speculation"].accepted == [15 + 3]


def test_after_an_error_the_cache_holds_its_committed_tokens() -> None:
    run = begin(small("falcon_h1"), PROMPTS, 5)
    truth = one_by_one(again(run))
    whole = [p + t for p, t in zip(run.cache.tokens, truth.tokens, strict=True)]
    calls: list[int] = []

    def fails(scores: Any, history: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return scores

    one = again(run)
    one.chooser = Chooser((fails,))
    with pytest.raises(KeyboardInterrupt):
        speculate(one, Oracle(run, truth, 0.7))
    held = one.cache.tokens
    assert held == [text[: len(part)] for text, part in zip(whole, held, strict=True)] != run.cache.tokens
    following = [text[len(part) : len(part) + 2] for text, part in zip(whole, held, strict=True)]
    logits = one.model([two[:1] for two in following], cache=one.cache, logits="last")
    assert logits is not None and logits.argmax(dim=-1).tolist() == [two[1] for two in following]
