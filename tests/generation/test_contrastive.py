"""Contrastive search against its formula, computed by whole passes of transformers' models and of the toys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.errors import InputError
from lamina.generation.introspect import introspect
from lamina.generation.strategies.contrastive import contrastive_search
from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.generation.strategies import PROMPTS, argmax_of, assert_can_be_continued, run_of
from tests.laws.toys import KINDS, EncoderDecoder, toy

Passes = Callable[[list[int]], tuple[Tensor, Tensor]]
"""ids -> logits after the last [V], last hidden states [T, width]"""


def by_definition(
    run: Passes, prompt: Sequence[int], new: int, k: int, alpha: float, change: Callable[..., Tensor] | None = None
) -> list[int]:
    """Every candidate of every token in a whole pass of its own."""
    ids = list(prompt)
    for _ in range(new):
        logits, states = run(ids)
        scores = logits.float() if change is None else change(logits.float(), ids)
        likely, candidates = scores.softmax(dim=-1).topk(k)
        best = []
        for p, candidate in zip(likely.tolist(), candidates.tolist(), strict=True):
            own = run([*ids, candidate])[1][-1]
            best.append((1 - alpha) * p - alpha * float(F.cosine_similarity(own[None], states).max()))
        ids.append(int(candidates[torch.tensor(best).argmax()]))
    return ids[len(prompt) :]


def theirs_run(theirs: Any) -> Passes:
    def run(ids: list[int]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out = theirs(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        return out.logits[0, -1], out.hidden_states[-1][0].float()

    return run


@pytest.mark.parametrize(("family", "name"), FIRST, ids=[family for family, _ in FIRST])
def test_every_family_gives_what_the_formula_gives_with_transformers_states(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    made = contrastive_search(run_of(ours, PROMPTS, penalty_alpha=0.6, top_k=4, max_new_tokens=9))
    for prompt, tokens in zip(PROMPTS, made.tokens, strict=True):
        assert tokens == by_definition(theirs_run(theirs), prompt, 9, 4, 0.6)
    assert_can_be_continued(ours, made, PROMPTS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_gives_what_whole_passes_give(kind: str) -> None:
    model, prompts, sources = toy(kind), [[1, 2, 3, 4, 5, 6, 7], [8, 3]], [[4, 5, 6], [7, 8, 9]]
    source = model.encode(sources) if isinstance(model, EncoderDecoder) else None
    cache = model.new_cache(2, source=source)
    made = contrastive_search(run_of(model, prompts, cache, penalty_alpha=0.7, top_k=3, max_new_tokens=6))
    for row, prompt in enumerate(prompts):

        def run(ids: list[int], row: int = row) -> tuple[Tensor, Tensor]:
            own = model.new_cache(1, source=None if source is None else model.encode(sources[row : row + 1]))
            logits = model([ids], cache=own, logits="last")
            assert logits is not None
            return logits[0], introspect(own).hidden[0][-1].float()

        assert made.tokens[row] == by_definition(run, prompt, 6, 3, 0.7)


def test_processors_change_who_the_candidates_are() -> None:
    theirs, ours = pair("llama", "grouped")
    run = run_of(ours, PROMPTS, penalty_alpha=0.5, top_k=3, max_new_tokens=8, suppress_tokens=(8, 17), repetition_penalty=1.5)  # fmt: skip  # noqa: E501

    def change(scores: Tensor, ids: list[int]) -> Tensor:
        seen = torch.tensor(sorted(set(ids)))
        scores[seen] = torch.where(scores[seen] < 0, scores[seen] * 1.5, scores[seen] / 1.5)
        scores[[8, 17]] = -torch.inf
        return scores

    made = contrastive_search(run)
    assert made.tokens == [by_definition(theirs_run(theirs), prompt, 8, 3, 0.5, change) for prompt in PROMPTS]


def test_without_a_penalty_or_with_one_candidate_it_is_greedy() -> None:
    model = pair("gemma2", "sliding and full in turn")[1]
    greedy = [argmax_of(lambda ids: model([ids], logits="last")[0], prompt, 10) for prompt in PROMPTS]
    assert contrastive_search(run_of(model, PROMPTS, penalty_alpha=0.0, top_k=5, max_new_tokens=10)).tokens == greedy
    assert contrastive_search(run_of(model, PROMPTS, penalty_alpha=0.9, top_k=1, max_new_tokens=10)).tokens == greedy


def test_rows_end_by_themselves_and_are_told_of() -> None:
    model, heard = pair("llama", "grouped")[1], []
    values: dict[str, Any] = dict(penalty_alpha=0.6, top_k=4, max_new_tokens=8)
    whole = contrastive_search(run_of(model, PROMPTS, **values)).tokens
    ends = (whole[1][2],)
    made = contrastive_search(
        run_of(model, PROMPTS, on_token=lambda *event: heard.append(event), eos_token_id=ends, **values)
    )
    for row, tokens in enumerate(whole):
        cut = tokens.index(ends[0]) + 1 if ends[0] in tokens else len(tokens)
        assert made.tokens[row] == tokens[:cut]
        assert made.reasons[row] == ("eos" if ends[0] in tokens else "length")
        assert [token for r, token, _ in heard if r == row] == tokens[:cut]
    assert_can_be_continued(model, made, PROMPTS)


def test_a_prompt_of_embeddings_is_refused_before_anything_is_made() -> None:
    model = toy("full")
    cache = model.new_cache(2)
    model(embeds=model.embed(torch.tensor([[1, 2], [3, 4]])), cache=cache)
    run = run_of(model, [[1], [2]], cache, penalty_alpha=0.6, top_k=4, max_new_tokens=3)
    with pytest.raises(InputError, match="token 0 of row 0 was given as an embedding"):
        contrastive_search(run)
    assert run.cache.tokens == [[-1, -1, 1], [-1, -1, 2]]


def test_generate_searches_by_contrast() -> None:
    model = pair("llama", "grouped")[1]
    values: dict[str, Any] = dict(penalty_alpha=0.6, top_k=4, max_new_tokens=6)
    result = model.generate(PROMPTS, output_scores=True, eos_token_id=(), **values)
    assert result.tokens == contrastive_search(run_of(model, PROMPTS, **values)).tokens
    assert [scores.shape for scores in result.scores] == [(6, model.vocab)] * 3
