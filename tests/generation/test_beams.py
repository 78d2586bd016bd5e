"""Beam search: transformers' tokens, scores and beams, prompt by prompt; every kind of layer; what the cache holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.cache import Cache
from lamina.errors import InputError
from lamina.generation.result import Recorder
from lamina.generation.run import StrategyOutput
from lamina.generation.strategies.beams import beam_search
from lamina.model import Model
from tests.families import test_t5
from tests.families.harness import pair
from tests.generation.statistics import chance
from tests.generation.strategies import PROMPTS, assert_can_be_continued, run_of
from tests.laws.toys import KINDS, VOCAB, EncoderDecoder, toy

MANY = tuple(range(3, 67, 5))  # end tokens, so that some sequences end early
FAMILIES = [("llama", "grouped"), ("gemma2", "sliding and full in turn"), ("qwen3_next", "grouped")]
SEARCHES: dict[str, dict[str, Any]] = {
    "plain": dict(num_beams=2),
    "several ends, long ones liked, none too early": dict(
        num_beams=4, num_return_sequences=3, eos_token_id=MANY, length_penalty=1.5, early_stopping="never"
    ),
    "short ones liked, as soon as there are enough": dict(
        num_beams=3, num_return_sequences=3, eos_token_id=MANY, length_penalty=-0.5, early_stopping=True
    ),
    "no penalty": dict(num_beams=3, num_return_sequences=2, eos_token_id=MANY, length_penalty=0.0),
    "changed scores": dict(
        num_beams=3, num_return_sequences=2, eos_token_id=MANY, repetition_penalty=1.4, no_repeat_ngram_size=2,
        min_new_tokens=4, bad_words_ids=((9,), (3, 44)), suppress_tokens=(17, 18), forced_eos_token_id=(43,),
        exponential_decay_length_penalty=(5, 1.2), renormalize_logits=True,
    ),
}  # fmt: skip
LISTS = ("eos_token_id", "suppress_tokens", "bad_words_ids", "forced_eos_token_id")


def theirs_of(theirs: Any, prompt: Sequence[int], **values: Any) -> Any:
    """What transformers makes of one prompt."""
    for name in LISTS:
        if name in values:
            values[name] = [list(one) if isinstance(one, tuple) else one for one in values[name]]
    ids = torch.tensor([prompt])
    return theirs.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=0, do_sample=False, return_dict_in_generate=True,
        output_scores=True, output_logits=True, **{"eos_token_id": None, **values},
    )  # fmt: skip


def assert_same(
    made: StrategyOutput, kept: Recorder | None, row: int, expected: Any, start: int, each: int, beams: int
) -> None:
    """The sequences of one prompt are transformers', with their scores, beams, and what they were chosen from."""
    for i in range(each):
        path = [beam for beam in expected.beam_indices[i].tolist() if beam >= 0]
        at = row * each + i
        assert made.tokens[at] == expected.sequences[i, start : start + len(path)].tolist()
        assert made.more["sequences_scores"][at] == pytest.approx(float(expected.sequences_scores[i]), abs=1e-4)
        assert [beam - row * beams for beam in made.more["beam_indices"][at]] == path
        for name in ("scores", "logits"):
            steps = torch.stack([expected[name][t][beam] for t, beam in enumerate(path)])
            torch.testing.assert_close(torch.stack(getattr(kept, name)[at]), steps, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(("family", "name"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_ragged_prompts_give_what_transformers_gives_for_each_alone(family: str, name: str, search: str) -> None:
    theirs, ours = pair(family, name)
    values = SEARCHES[search] | {"max_new_tokens": 10}
    run = run_of(ours, PROMPTS, output_scores=True, output_logits=True, **values)
    made = beam_search(run)
    each = values.get("num_return_sequences", 1)
    for row, prompt in enumerate(PROMPTS):
        assert_same(
            made, run.recorder, row, theirs_of(theirs, prompt, **values), len(prompt), each, values["num_beams"]
        )
    assert_can_be_continued(ours, made, PROMPTS)


def test_a_decoder_with_a_source_gives_what_transformers_gives() -> None:
    theirs, ours = test_t5.pair(test_t5.FIRST)
    values: dict[str, Any] = dict(num_beams=3, num_return_sequences=2, eos_token_id=MANY, max_new_tokens=8)
    rows = test_t5.random_rows([9, 2, 5], seed=3)
    cache = ours.new_cache(3, source=test_t5.encode_rows(ours, rows))
    run = run_of(ours, [[0]] * 3, cache, output_scores=True, output_logits=True, **values)
    made = beam_search(run)
    for row, source in enumerate(rows):
        assert_same(made, run.recorder, row, theirs_of(theirs, source.tolist(), **values), 1, 2, 3)
    assert made.cache.tokens == [[0, *tokens] for tokens in made.tokens]


# -- every kind of layer -----------------------------------------------------------------------------------------------


def by_definition(
    logits: Any, prompt: Sequence[int], beams: int, new: int, ends: Sequence[int], penalty: float
) -> list[tuple[float, list[int]]]:
    """All continuations of all beams, every sequence run whole again."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for n in range(1, new + 1):
        found = []
        for score, tokens in live:
            shares = logits([*prompt, *tokens]).float().log_softmax(dim=-1).tolist()
            found += [(score + share, [*tokens, token]) for token, share in enumerate(shares)]
        found = sorted(found, reverse=True)[: max(2, 1 + len(ends)) * beams]
        over = [one for one in found[:beams] if one[1][-1] in ends or n == new]
        ended = sorted([*ended, *((score / n**penalty, tokens) for score, tokens in over)], reverse=True)[:beams]
        live = [one for one in found if one[1][-1] not in ends][:beams]
        if len(ended) == beams and live[0][0] / n**penalty <= ended[-1][0]:
            break
    return ended


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_gives_what_whole_passes_give(kind: str) -> None:
    model, prompts, ends = toy(kind), [[1, 2, 3, 4, 5, 6, 7], [8, 3]], (2,)
    source = model.encode([[4, 5, 6], [7, 8, 9]]) if isinstance(model, EncoderDecoder) else None
    cache = model.new_cache(2, source=source)
    made = beam_search(run_of(model, prompts, cache, num_beams=3, num_return_sequences=3, eos_token_id=ends, max_new_tokens=7))  # fmt: skip  # noqa: E501

    @functools.cache
    def last(row: int, ids: tuple[int, ...]) -> Tensor:
        own = None if source is None else model.encode([[[4, 5, 6], [7, 8, 9]][row]])
        logits = model([list(ids)], source=own, logits="last")
        assert logits is not None
        return logits[0]

    for row, prompt in enumerate(prompts):
        expected = by_definition(lambda ids, row=row: last(row, tuple(ids)), prompt, 3, 7, ends, 1.0)
        assert made.tokens[3 * row : 3 * row + 3] == [tokens for _, tokens in expected]
        assert made.more["sequences_scores"][3 * row : 3 * row + 3] == pytest.approx([s for s, _ in expected], abs=1e-4)
    if source is None:
        assert_can_be_continued(model, made, prompts)


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_beam_sampling_draws_without_replacement_by_probability() -> None:
    """One token by two beams: the better of two different tokens, drawn one after the other."""
    model, draws, kinds = toy("full"), 3000, 6
    values: dict[str, Any] = dict(num_beams=2, do_sample=True, max_new_tokens=1, seed=5, top_k=kinds, temperature=1.3)
    run = run_of(model, [[1, 2, 3]] * draws, **values)
    p = run.chooser.scores(run.logits[:1].float().log_softmax(dim=-1), run.history([0]))[0].softmax(dim=-1).double()
    made = beam_search(run)
    pairs = p[:, None] * p[None] / (1 - p)[:, None]  # one, then another of those left
    likely = torch.zeros(VOCAB, dtype=torch.float64)
    for a, b in torch.combinations(torch.arange(VOCAB)).tolist():
        likely[a if p[a] > p[b] else b] += pairs[a, b] + pairs[b, a]
    counts = torch.tensor([row[0] for row in made.tokens]).bincount(minlength=VOCAB)
    assert int((p > 0).sum()) == kinds and counts[p == 0].sum() == 0
    assert chance(counts, likely) > 0.01


def test_a_prompt_draws_the_same_beams_alone_and_in_a_batch() -> None:
    model = pair("llama", "grouped")[1]
    values: dict[str, Any] = dict(num_beams=3, num_return_sequences=2, do_sample=True, max_new_tokens=8, seed=3)
    together = beam_search(run_of(model, PROMPTS, row_ids=[4, 2, 7], **values))
    alone = beam_search(run_of(model, PROMPTS[1:2], row_ids=[2], **values))
    assert together.tokens[2:4] == alone.tokens
    assert together.tokens[:2] != beam_search(run_of(model, PROMPTS[:1], row_ids=[5], **values)).tokens


# -- how it is done ----------------------------------------------------------------------------------------------------


class Spy:
    """Counts tokens that run through a model and slots that reordering touches."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fed: list[tuple[int, int]] = []
        self.moved: list[list[tuple[int, int, int]]] = []  # (row, from, tokens to be copied) at every step
        forward, reorder = Model.forward, Cache.reorder

        def counting(model: Any, ids: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
            self.fed.append(tuple(ids.shape))
            return forward(model, ids, step, *args, **kwargs)

        def watching(cache: Cache, rows: Any, since: Any = 0) -> Cache:
            lengths = cache.lengths.tolist()
            self.moved.append([(i, r, lengths[r] - since[i]) for i, r in enumerate(rows) if i != r])
            return reorder(cache, rows, since)

        patch.setattr(Model, "forward", counting)
        patch.setattr(Cache, "reorder", watching)


def test_the_prompt_runs_once_and_rows_copy_only_what_they_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model, new = pair("llama", "grouped")[1], 30
    run = run_of(model, PROMPTS[:1], num_beams=4, max_new_tokens=new)
    spy = Spy(monkeypatch)
    made = beam_search(run)
    assert spy.fed == [(4, 1)] * (new - 1) + [(1, new)]  # the sequence that is returned is fed once more
    assert len(spy.moved) == new - 1
    assert [(to, tokens) for to, _, tokens in spy.moved[0]] == [(1, 0), (2, 0), (3, 0)]  # all four were the prompt
    for step in spy.moved:
        assert len({to for to, _, _ in step} & {source for _, source, _ in step}) == 0  # who goes on stays
    copied = sum(tokens for step in spy.moved for _, _, tokens in step)
    assert copied < 0.3 * sum(4 * n for n in range(new))  # of all that the four rows held past their prompt
    assert len(made.tokens[0]) == new


def test_the_scores_along_a_sequence_add_up_to_its_own() -> None:
    model = pair("llama", "grouped")[1]
    values: dict[str, Any] = dict(num_beams=4, num_return_sequences=4, eos_token_id=(11, 40), max_new_tokens=9)
    run = run_of(model, PROMPTS, output_scores=True, logprobs=2, length_penalty=0.7, **values)
    made = beam_search(run)
    assert run.recorder is not None and run.recorder.scores is not None
    for row, (tokens, score) in enumerate(zip(made.tokens, made.more["sequences_scores"], strict=True)):
        total = float(torch.stack(run.recorder.scores[row])[range(len(tokens)), tokens].sum())
        assert total == pytest.approx(sum(one.logprob for one in run.recorder.logprobs[row]), abs=1e-4)
        assert score == pytest.approx(total / len(tokens) ** 0.7, abs=1e-4)


def test_reasons_and_listeners_hear_of_the_returned_sequences() -> None:
    model, heard = pair("llama", "grouped")[1], []
    values: dict[str, Any] = dict(num_beams=3, num_return_sequences=2, eos_token_id=MANY, max_new_tokens=6)
    run = run_of(model, PROMPTS, on_token=lambda *event: heard.append(event), **values)
    made = beam_search(run)
    assert made.reasons == ["eos" if tokens[-1] in values["eos_token_id"] else "length" for tokens in made.tokens]
    assert set(made.reasons) == {"eos", "length"}
    assert run.stopping.reasons == made.reasons
    assert heard == [
        (i, token, made.reasons[i] if t == len(tokens) - 1 else None)
        for i, tokens in enumerate(made.tokens)
        for t, token in enumerate(tokens)
    ]


def test_a_stop_function_of_the_caller_is_given_the_prompts_row_and_one_beams_tokens() -> None:
    model, asked = pair("llama", "grouped")[1], []

    def stop(row: int, tokens: list[int], text: str) -> bool:
        asked.append((row, len(tokens)))
        return len(tokens) == 2 + row

    made = beam_search(run_of(model, PROMPTS, num_beams=2, max_new_tokens=9, stop=(stop,)))
    assert [len(tokens) for tokens in made.tokens] == [2, 3, 4]
    assert made.reasons == ["stop"] * 3
    assert {row for row, _ in asked} == {0, 1, 2}


def test_where_there_are_fewer_ways_to_go_on_than_beams_the_best_are_returned_again() -> None:
    model = toy("full")
    banned = tuple(range(2, VOCAB))
    values: dict[str, Any] = dict(num_beams=4, num_return_sequences=4, suppress_tokens=banned, max_new_tokens=1)
    made = beam_search(run_of(model, [[1, 2, 3]], **values))
    assert sorted(made.tokens[:2]) == [[0], [1]]
    assert made.tokens[2:] == made.tokens[:2]
    assert_can_be_continued(model, made, [[1, 2, 3]])


def test_an_error_on_the_way_leaves_the_prompts_cache_as_it_was() -> None:
    model = pair("llama", "grouped")[1]

    def stop(row: int, tokens: list[int], text: str) -> bool:
        if len(tokens) == 3:
            raise KeyboardInterrupt
        return False

    run = run_of(model, PROMPTS, num_beams=2, max_new_tokens=9, stop=(stop,))
    with pytest.raises(KeyboardInterrupt):
        beam_search(run)
    assert run.cache.tokens == PROMPTS


def test_generate_searches_with_beams_and_goes_on_from_their_cache() -> None:
    model = pair("qwen3_next", "grouped")[1]
    values: dict[str, Any] = dict(num_beams=3, num_return_sequences=2, eos_token_id=MANY, max_new_tokens=7)
    result = model.generate(PROMPTS, output_scores=True, logprobs=1, **values)
    made = beam_search(run_of(model, PROMPTS, **values))
    assert result.tokens == made.tokens
    assert result.sequences_scores == made.more["sequences_scores"] and result.beam_indices == made.more["beam_indices"]
    with pytest.raises(InputError, match="this result has no speculation: generate with prompt_lookup_num_tokens"):
        _ = result.speculation
    assert result.prompts == [prompt for prompt in PROMPTS for _ in range(2)]
    assert [len(scores) for scores in result.scores] == [len(tokens) for tokens in result.tokens]
    assert [one.token for one in result.logprobs[3]] == result.tokens[3]
    whole = [[*prompt, *tokens, 1, 2] for prompt, tokens in zip(result.prompts, result.tokens, strict=True)]
    more = model.generate([[1, 2]] * 6, cache=result.cache, whole=False, num_beams=3, eos_token_id=MANY)
    assert more.tokens == model.generate(whole, num_beams=3, eos_token_id=MANY).tokens


def test_one_row_of_a_cache_serves_many_prompts() -> None:
    model, start = pair("llama", "grouped")[1], [5, 9, 12]
    cache = model.new_cache(1)
    model([start], cache=cache)
    values: dict[str, Any] = dict(num_beams=2, max_new_tokens=5, eos_token_id=())
    found = model.generate([[7], [8, 1]], cache=cache, whole=False, **values)
    assert found.tokens == model.generate([[*start, 7], [*start, 8, 1]], **values).tokens
    assert cache.tokens == [start]


def test_a_function_that_lists_what_may_come_is_asked_about_each_beam_by_its_prompts_number() -> None:
    theirs, ours = pair("llama", "grouped")
    asked: set[int] = set()

    def allowed(row: int, ids: Tensor) -> list[int]:
        asked.add(row)
        return [(int(ids[-1]) * 7 + step) % 67 for step in (1, 5, 11, 30)]

    values: dict[str, Any] = dict(num_beams=3, num_return_sequences=2, max_new_tokens=6)
    made = beam_search(run_of(ours, PROMPTS, prefix_allowed_tokens_fn=allowed, **values))
    assert asked == {0, 1, 2}
    for row, prompt in enumerate(PROMPTS):
        expected = theirs_of(theirs, prompt, prefix_allowed_tokens_fn=allowed, **values)
        assert made.tokens[2 * row : 2 * row + 2] == expected.sequences[:, len(prompt) :].tolist()
