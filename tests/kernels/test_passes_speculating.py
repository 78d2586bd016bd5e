"""Speculation on captured passes makes the tokens of plain decoding, whatever its drafts are worth."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.generation.strategies.drafts import Draft
from lamina.generation.strategies.plain import decode_plain
from lamina.generation.strategies.speculation import speculate
from lamina.sampling.chooser import Chooser
from tests.generation.drafted import Oracle, again, begin, same
from tests.kernels.runs import small

PROMPTS = [[5, 9, 12, 3, 44, 9, 12], [7]]
pytestmark = pytest.mark.usefixtures("few_programs", "passes_by_kernels")


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2", "falcon_h1", "qwen3_next", "deepseek_v3"])
def test_drafts_right_sometimes_and_never_give_the_greedy_tokens(family: str) -> None:
    run = begin(small(family), PROMPTS, 4)
    truth = decode_plain(again(run))
    found = speculate(again(run, num_assistant_tokens=3), Oracle(run, truth, 0.7, 0))
    same(found, truth, run)
    assert found.how == "captured passes of several tokens"
    assert found.more["speculation"].row(0).acceptance_rate > found.more["speculation"].row(1).acceptance_rate == 0


def test_drafts_are_as_long_as_a_captured_pass_has_room_for_and_may_always_be_right() -> None:
    run = begin(small("llama"), PROMPTS[1:], 20)
    truth = decode_plain(again(run))
    text = run.cache.tokens[0] + truth.tokens[0]
    right = lambda rows, texts, most: Draft([text[len(texts[0]) : len(texts[0]) + most[0]]])  # noqa: E731
    found = speculate(again(run, num_assistant_tokens=30), right)
    assert found.tokens == truth.tokens
    assert found.more["speculation"].drafted == found.more["speculation"].accepted == [15 + 3]


def test_after_an_error_the_cache_holds_its_committed_tokens() -> None:
    run = begin(small("qwen3_next"), PROMPTS, 5)
    truth = decode_plain(again(run))
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
