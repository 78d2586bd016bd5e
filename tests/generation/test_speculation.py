"""Speculation gives what plain decoding gives: the same tokens greedily, the same distribution when sampling, and the
same cache, for every family, ragged rows, and drafts that are right never, sometimes or always."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from lamina.errors import InputError
from lamina.generation.run import Run
from lamina.generation.stopping import Stopping
from lamina.generation.strategies.drafts import Assistant, Draft, Drafter, DraftLengths, PromptLookup, early_exit
from lamina.generation.strategies.plain import decode_plain
from lamina.generation.strategies.speculation import drafter_of, speculate
from lamina.model import Model
from lamina.sampling.chooser import Chooser
from lamina.sampling.history import History
from tests.families.harness import pair
from tests.generation.drafted import FAMILIES, PROMPTS, Oracle, again, begin, like, model_of, ragged, same, tiny

# -- greedy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_every_family_gives_the_greedy_tokens_with_drafts_right_never_sometimes_and_always(family: str) -> None:
    for rows in (1, 8):
        run = begin(model_of(family), ragged(rows, seed=rows), 18)
        truth = decode_plain(again(run))
        found = speculate(again(run), Oracle(run, truth, 0.7, 1, 0, 0.5))
        same(found, truth, run)
        stats = found.more["speculation"]
        assert stats.made == [18] * rows
        assert stats.row(0).tokens_per_pass > 1
    assert 0 < stats.row(0).acceptance_rate < stats.row(1).acceptance_rate == 1
    assert stats.row(2).acceptance_rate == 0 and stats.row(2).tokens_per_pass == 1


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_an_assistant_of_every_family_stays_in_step_and_the_tokens_are_the_greedy_ones(family: str) -> None:
    model = model_of(family)
    run = begin(model, PROMPTS, 14, prefill_chunk=4)
    truth = decode_plain(again(run))
    assistant = like(model, 0.3)
    run_with = again(run, assistant_model=assistant)
    draft, lengths = drafter_of(run_with)
    found = speculate(run_with, checked(draft, assistant, run), lengths)
    same(found, truth, run)
    assert 0 < found.more["speculation"].acceptance_rate < 1


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_an_early_exit_of_every_family_stays_in_step_and_the_tokens_are_the_greedy_ones(family: str) -> None:
    model = model_of(family)
    run = begin(model, PROMPTS, 12)
    truth = decode_plain(again(run))
    run_with = again(run, assistant_early_exit=1, num_assistant_tokens=3)
    draft, lengths = drafter_of(run_with)
    assert isinstance(draft, Assistant)
    assert len(draft.cache.layers) == 1 and len(model.blocks) > 1
    found = speculate(run_with, checked(draft, draft.model, run), lengths)
    same(found, truth, run)


def checked(draft: Drafter, assistant: Model, run: Run) -> Drafter:
    """The draft, if it guesses what the assistant says in uncached passes over the whole text."""

    def ask(rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Draft:
        guess = draft(rows, texts, most)
        for row, text, n, tokens in zip(rows, texts, most, guess.tokens, strict=True):
            assert len(tokens) == n
            source = None
            if run.source_ids is not None:
                source = assistant.encode(run.source_ids[row, run.source_ids[row] >= 0][None])
            logits = assistant(torch.tensor([[*text, *tokens]]), source=source)
            assert logits is not None
            assert logits[0, len(text) - 1 : -1].argmax(dim=-1).tolist() == tokens
        return guess

    return ask


def test_the_model_as_its_own_assistant_is_always_right() -> None:
    for family in ("llama", "gemma2", "qwen3_next"):
        run = begin(model_of(family), PROMPTS, 20)
        stats = speculate(again(run, assistant_model=model_of(family))).more["speculation"]
        assert stats.acceptance_rate == 1
        assert stats.passes == [4] * 3  # the first token comes with the prompt; then 5, 5, 5, and 4 that end it


def test_rows_that_end_inside_accepted_guesses_hold_only_what_comes_before_that() -> None:
    run = begin(model_of("gemma2"), ragged(6), 30)
    free = decode_plain(again(run))
    run.stopping = Stopping([30] * 6, {free.tokens[0][7], free.tokens[3][11], free.tokens[4][0]})
    truth = decode_plain(again(run))
    assert "eos" in truth.reasons
    told: list[tuple[int, int, str | None]] = []
    run.on_token = lambda *event: told.append(event)
    for luck in (1.0, 0.7):
        told.clear()
        same(speculate(again(run, num_assistant_tokens=6), Oracle(run, free, luck)), truth, run)
        for row, tokens in enumerate(truth.tokens):
            reasons = [None] * (len(tokens) - 1) + [truth.reasons[row]]
            assert [event[1:] for event in told if event[0] == row] == list(zip(tokens, reasons, strict=True))


def test_a_cache_with_just_enough_room_is_enough() -> None:
    prompts = [row[:9] for row in PROMPTS]
    run = begin(model_of("llama"), prompts, 16, capacity=9 + 16)
    truth = decode_plain(again(run))
    found = speculate(again(run, max_new_tokens=None), Oracle(run, truth, 1.0))
    assert found.tokens == truth.tokens and found.cache.tokens == truth.cache.tokens
    assert max(found.cache.lengths) == found.cache.limit


def test_an_assistant_with_fewer_positions_drafts_as_far_as_they_go() -> None:
    run = begin(model_of("llama"), PROMPTS, 16)
    assistant = like(run.model, 0.0)
    assistant.max_positions = 14
    found = speculate(again(run, assistant_model=assistant))
    same(found, decode_plain(again(run)), run)
    assert found.more["speculation"].drafted == [4, 4 + 4 + 3, 4 + 4 + 1]  # the last guess is made of 14 tokens


def test_lookup_and_an_assistant_give_the_tokens_that_transformers_gives_with_them() -> None:
    theirs, model = pair("llama", "grouped")
    prompt = [[11, 12, 13, 14, 11, 12, 13, 20, 11, 12]]
    plain = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor(prompt)
    expected = theirs.generate(ids, **plain)[0, len(prompt[0]) :].tolist()
    looked_up = theirs.generate(ids, prompt_lookup_num_tokens=3, **plain)[0, len(prompt[0]) :].tolist()
    assisted = theirs.generate(ids, assistant_model=copy.deepcopy(theirs), **plain)[0, len(prompt[0]) :].tolist()
    assert expected == looked_up == assisted
    for changes in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": like(model, 0.1)}):
        assert speculate(begin(model, prompt, 24, **changes)).tokens == [expected]


def test_lookup_guesses_what_transformers_guesses() -> None:
    rng = random.Random(0)
    for _ in range(60):
        longest, most, text = rng.randint(1, 4), rng.randint(1, 6), [rng.randrange(4) for _ in range(2)]
        ours = PromptLookup(longest)
        theirs = PromptLookupCandidateGenerator(
            num_output_tokens=most, max_matching_ngram_size=longest, max_length=1000
        )
        for _ in range(8):
            expected = theirs.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
            assert ours([5], [text], [most]).tokens == [expected]
            text += [rng.randrange(4) for _ in range(rng.randint(1, 3))]


# -- processors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoRecent:
    """Bans the last two tokens, and an id that has come up three times; checks that it is shown nothing wrong."""

    texts: list[list[int]]
    needs_tokens: ClassVar[bool] = True

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        assert history.ids is not None
        for row, length in zip(history.ids.tolist(), history.lengths.tolist(), strict=True):
            assert row[:length] in [text[:length] for text in self.texts] if self.texts else True
            assert set(row[length:]) <= {-1}
        last = history.ids.gather(1, (history.lengths[:, None] - torch.tensor([1, 2])).clamp(min=0))
        return scores.scatter(1, last, -torch.inf).masked_fill(history.seen(67) > 2, -torch.inf)


@dataclass(frozen=True)
class Penalty:
    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        late = (history.lengths - history.prompts)[:, None] * 0.01
        return scores - history.seen(67) * 0.4 - late * torch.arange(67)


def test_processors_at_every_place_see_the_tokens_before_it_and_no_wrong_ones() -> None:
    run = begin(model_of("llama"), ragged(5, seed=3), 20)
    for processors in ((NoRecent([]),), (Penalty(),), (Penalty(), lambda scores, history: scores.roll(1, dims=1))):
        run.chooser = Chooser(processors)
        truth = decode_plain(again(run))
        if isinstance(processors[0], NoRecent):
            processors[0].texts.extend(p + t for p, t in zip(run.cache.tokens, truth.tokens, strict=True))
        same(speculate(again(run), Oracle(run, truth, 0.7)), truth, run)
    for made in (
        speculate(again(run, prompt_lookup_num_tokens=4)),
        speculate(again(run, assistant_model=like(run.model, 0.05))),
    ):
        same(made, truth, run)


# -- schedules, errors -------------------------------------------------------------------------------------------------


def test_a_schedule_learns_for_each_row_by_itself() -> None:
    lengths = DraftLengths(2, 5, "heuristic")
    lengths.update(0, 5, 5)
    lengths.update(1, 5, 4)
    assert lengths.lengths == [7, 4]
    for _ in range(40):
        lengths.update(0, 7, 7)
        lengths.update(1, 4, 0)
    assert lengths.lengths == [lengths.most, 1]
    lengths.update(1, 0, 0)
    assert lengths.lengths[1] == 1
    constant = DraftLengths(1, 5)
    constant.update(0, 5, 5)
    assert constant.lengths == [5] and constant.most == 5


def test_a_learning_schedule_gives_the_greedy_tokens_with_few_passes() -> None:
    model = model_of("mamba2")
    run = begin(model, PROMPTS, 40)
    truth = decode_plain(again(run))
    changes = dict(assistant_model=model, num_assistant_tokens=1)
    found = speculate(again(run, num_assistant_tokens_schedule="heuristic", **changes))
    same(found, truth, run)
    assert max(found.more["speculation"].passes) < max(speculate(again(run, **changes)).more["speculation"].passes) / 2


def test_a_threshold_ends_a_draft_after_the_token_that_is_below_it() -> None:
    model = model_of("llama")
    run = begin(model, PROMPTS, 12)
    texts = [[*text, 1] for text in run.cache.tokens]

    def guess(threshold: float) -> list[list[int]]:
        return Assistant(again(run), like(model, 0.1), 6, threshold)([0, 1, 2], texts, [6, 6, 6]).tokens

    free, short = guess(0.0), guess(1.0)
    assert [len(tokens) for tokens in free] == [6, 6, 6]
    assert short == [tokens[:1] for tokens in free]


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
def test_after_an_error_the_cache_holds_its_committed_tokens_and_can_be_continued(family: str) -> None:
    run = begin(model_of(family), PROMPTS, 20)
    truth = decode_plain(again(run))

    def fails_at(n: int, call: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(n))

        def wrapped(*given: Any) -> Any:
            if next(calls, None) is None:
                raise KeyError("in the middle")
            return call(*given)

        return wrapped

    oracle = Oracle(run, truth, 0.7)
    stopping = run.stopping.select(range(3))
    broken = [
        (again(run), fails_at(3, oracle)),
        (replace(again(run), chooser=Chooser((fails_at(7, lambda scores, history: scores),))), oracle),
        (replace(again(run), stopping=SimpleNamespace(put=fails_at(17, stopping.put), rows=stopping.rows)), oracle),
        (replace(again(run), on_token=fails_at(15, lambda *event: None)), oracle),
    ]
    for one, draft in broken:
        with pytest.raises(KeyError, match="in the middle"):
            speculate(one, draft)
        held = one.cache.tokens
        whole = [p + t for p, t in zip(run.cache.tokens, truth.tokens, strict=True)]
        assert held == [text[: len(part)] for text, part in zip(whole, held, strict=True)]
        assert any(len(part) > count for part, count in zip(held, run.prompt_lengths, strict=True))
        following = [text[len(part) : len(part) + 2] for text, part in zip(whole, held, strict=True)]
        logits = one.model([pair[:1] for pair in following], cache=one.cache, logits="last")
        assert logits is not None
        assert logits.argmax(dim=-1).tolist() == [pair[1] for pair in following]


def test_what_cannot_be_used_is_refused_in_words() -> None:
    model = model_of("llama")
    run = begin(model, PROMPTS, 4)
    with pytest.raises(InputError, match="vocabulary of 4 ids and the model one of 67"):
        speculate(again(run, assistant_model=tiny(0)))
    with pytest.raises(
        InputError, match="assistant_early_exit=2: the model has 2 layers, so it must be between 1 and 1"
    ):
        speculate(again(run, assistant_early_exit=2))
    with pytest.raises(InputError, match="needs assistant_model, prompt_lookup_num_tokens or assistant_early_exit"):
        speculate(again(run))
    with pytest.raises(InputError, match="must be one of constant, heuristic, heuristic_transient, not 'often'"):
        DraftLengths(1, 4, "often")
    with pytest.raises(InputError, match="at least 1 token long, not 0"):
        DraftLengths(1, 0)
    with pytest.raises(InputError, match="max_matching_ngram_size must be at least 1, not 0"):
        PromptLookup(0)
    with pytest.raises(InputError, match="T5, which reads a source, and there are no source ids"):
        speculate(again(run, assistant_model=model_of("t5")))
    cache = model.new_cache(1)
    logits = model(embeds=torch.zeros(1, 3, 32), cache=cache, logits="last")
    assert logits is not None
    fed = replace(run, cache=cache, logits=logits, prompt_lengths=[3], row_ids=[0])
    with pytest.raises(InputError, match="row 0 holds embeddings"):
        speculate(again(fed, assistant_model=model))
    same(speculate(again(fed, prompt_lookup_num_tokens=3)), decode_plain(again(fed)), fed)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_an_early_exit_reads_the_source_that_the_cache_holds(codec: str | None) -> None:
    model, begun = model_of("t5"), [[0, 3, 4, 5], [0, 6]]
    source = model.encode([[7, 8, 9, 10], [11, 12, 13, 14]], counts=[4, 2])
    draft = dict(assistant_early_exit=1, num_assistant_tokens=3, assistant_confidence_threshold=0)
    plain, drafted = (
        model.generate(None, 8, cache=model.new_cache(2, source=source, codec=codec), decoder_input_ids=begun, **asked)
        for asked in (dict(eos_token_id=()), dict(eos_token_id=()) | draft)
    )
    assert drafted.tokens == plain.tokens
    fresh = model.generate([[7, 8, 9, 10], [11, 12]], 8, decoder_input_ids=[[3, 4, 5], [6]], eos_token_id=(), **draft)
    if codec is None:  # as over an encoding of its own, behind the start id
        assert fresh.tokens == plain.tokens
        assert drafted.speculation == fresh.speculation


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (dict(assistant_model="t5"), "there are no source ids: give the source's ids as the prompt"),
        (dict(dola_layers=[1]), "hidden states of Gemma3n are 128 wide"),
        (dict(penalty_alpha=0.5, top_k=3), "token 0 of row 0 was given as an embedding, and penalty_alpha reads whole"),
        (dict(assistant_early_exit=1), "row 0 holds embeddings"),
        (dict(output_hidden_states=True), "row 0 was given as an embedding, and output_hidden_states reads whole rows"),
    ],
)
def test_what_a_strategy_cannot_do_is_refused_before_the_prompt_is_fed(asked: dict[str, Any], error: str) -> None:
    model, given = model_of("llama"), dict(prompts=[[3, 4]])
    if "assistant_model" in asked:
        model = model_of("t5")
        asked, given = dict(assistant_model=model), dict(decoder_input_ids=[[3, 4]])
    elif "dola_layers" in asked:
        model = pair("gemma3n_text", "last layers share, wide inputs")[1]
    cache = model.new_cache(1, source=model.encode([[7, 8]]) if model.start_ids else None)
    model([[5, 6]], cache=cache) if model.start_ids else model(embeds=model.embed(torch.tensor([[5, 6]])), cache=cache)
    with pytest.raises(InputError, match=error):
        model.generate(max_new_tokens=3, cache=cache, **given, **asked)
    assert cache.lengths.tolist() == [2]


def test_an_early_exit_shares_the_weights_and_leaves_the_model_as_it_is() -> None:
    model = model_of("gemma2")
    first = early_exit(model, 2)
    assert len(first.blocks) == 2 and len(model.blocks) == 4
    assert all(a is b for a, b in zip(first.parameters(), model.parameters(), strict=False) if a.dim() == 2)
    assert first.new_cache().model is first
