"""Drafts on captured passes: drawn tokens are those of plain passes, and an assistant's own passes are captured too."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.generation.strategies.drafts import Assistant
from lamina.generation.strategies.plain import decode_plain
from lamina.generation.strategies.speculation import drafter_of, speculate
from lamina.sampling.chooser import Chooser
from tests.generation.drafted import again, begin
from tests.generation.vocabularies import few, reads, with_permuted_ids
from tests.kernels.runs import small

PROMPTS = [[5, 9, 12, 3, 44, 9, 12], [7]]
pytestmark = pytest.mark.usefixtures("few_programs", "passes_by_kernels")


@pytest.mark.parametrize("changes", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}], ids=str)
def test_tokens_drawn_are_those_of_plain_passes_with_the_same_seed(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = lambda scores, history: scores * 2 - history.seen(scores.shape[1])  # noqa: E731
    run = begin(small("gemma2"), PROMPTS, 4, chooser=Chooser((warm,), sample=True, seed=3), num_assistant_tokens=2)
    found = speculate(again(run, **changes))
    monkeypatch.setattr("lamina.generation.feed.why_no_passes", lambda model, cache: "of this test")
    plain = speculate(again(run, **changes))
    assert (found.tokens, found.more) == (plain.tokens, plain.more)
    assert found.how == "captured passes of several tokens"
    assert plain.how == "plain passes of several tokens, since of this test"


def test_an_assistants_passes_are_captured_too_and_an_exit_keeps_its_graphs() -> None:
    run = begin(small("gemma2"), PROMPTS[1:], 3)
    truth = decode_plain(again(run))
    captures = []
    for _ in range(2):
        run_with = again(run, assistant_early_exit=1, num_assistant_tokens=2)
        draft, lengths = drafter_of(run_with)
        assert isinstance(draft, Assistant)
        assert speculate(run_with, draft, lengths).tokens == truth.tokens
        captures.append(draft.model.graphs.captures)
    assert captures[0] == captures[1] > 0


def test_a_recurrent_assistant_reads_by_captured_passes_and_is_rewound() -> None:
    run = begin(small("llama"), PROMPTS, 4)
    found = speculate(again(run, assistant_model=small("mamba2"), num_assistant_tokens=2))
    assert found.tokens == decode_plain(again(run)).tokens
    assert found.how == "captured passes of several tokens"


def test_an_assistant_with_another_tokenizer_is_read_by_captured_passes() -> None:
    model = reads(small("llama"), few())
    run = begin(model, PROMPTS, 6)
    found = speculate(again(run, assistant_model=with_permuted_ids(model), num_assistant_tokens=2))
    assert found.tokens == decode_plain(again(run)).tokens
    assert found.more["speculation"].acceptance_rate == 1
    assert found.how == (
        "captured passes of several tokens; drafts converted through text, since the assistant has another tokenizer"
    )
