"""Speculation gives what plain decoding gives: the same tokens greedily, the same distribution when sampling, and the
same cache, for every family, ragged rows, and drafts that are right never, sometimes or always."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from lamina.config import Config
from lamina.errors import InputError
from lamina.generation.drafts import Assistant, Draft, Guess, Lookup, Schedule, draft_of, early_exit
from lamina.generation.history import History
from lamina.generation.prompt import from_rows
from lamina.generation.run import Chooser, Made, Run, one_by_one
from lamina.generation.speculation import settle, speculate
from lamina.generation.stopping import Stopping
from lamina.model import Model
from lamina.models.llama import Llama
from tests.families.cases import FIRST
from tests.families.harness import pair, random_ids
from tests.families.test_t5 import pair as t5_pair

FAMILIES = [family for family, _ in FIRST]
PROMPTS = [[5, 9, 12, 3, 44, 8, 21, 9, 12], [7], [30, 31, 32]]


def settings(**changes: Any) -> Any:
    default: dict[str, Any] = dict(
        max_new_tokens=None, max_length=None, prefill_chunk=None, assistant_model=None, prompt_lookup_num_tokens=None,
        max_matching_ngram_size=2, assistant_early_exit=None, num_assistant_tokens=4,
        num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0,
    )  # fmt: skip
    return SimpleNamespace(**default | changes)


def begin(model: Model, prompts: list[list[int]], new: int, eos: tuple[int, ...] = (), **more: Any) -> Run:
    """A run after its prompts; models with an encoder read them as their sources."""
    prompt, source = from_rows(prompts), None
    capacity = more.pop("capacity", None)
    chooser = more.pop("chooser", Chooser())
    with torch.no_grad():
        cache = model.new_cache(len(prompts), capacity)
        if model.start_ids:
            cache.attach(model.encode(prompt.ids, prompt.counts))
            source = prompt.ids.masked_fill(
                torch.arange(prompt.ids.shape[1]) >= torch.tensor(prompt.counts)[:, None], -1
            )
            prompt = from_rows([[*model.start_ids, *row[:2]] for row in prompts])
        logits = model(prompt.ids, cache=cache, counts=prompt.counts, logits="last")
    assert logits is not None
    return Run(
        model, cache, logits, chooser, Stopping([new] * len(prompts), eos), prompt.counts, list(range(len(prompts))),
        settings(max_new_tokens=new, **more), source=source,
    )  # fmt: skip


def again(run: Run, **changes: Any) -> Run:
    """The same run, with a cache of its own."""
    return replace(
        run,
        cache=run.cache.fork(),
        stopping=run.stopping.select(range(run.rows)),
        settings=settings(**vars(run.settings) | changes),
    )


def ragged(rows: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(67) for _ in range(rng.randint(1, 14))] for _ in range(rows)]


@functools.cache
def model_of(family: str) -> Model:
    return t5_pair("own head, few buckets, gated silu")[1] if family == "t5" else pair(family, dict(FIRST)[family])[1]


def like(model: Model, noise: float) -> Model:
    """Nearly the same model: its guesses are sometimes right."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    for parameter in other.parameters():
        parameter.add_(torch.randn_like(parameter) * noise * parameter.abs().mean())
    return other


class Oracle:
    """Knows what comes, and says it with probability `luck` (by row: the first again after the last); else something
    else."""

    def __init__(self, run: Run, truth: Made, *luck: float) -> None:
        self.texts = [text + new for text, new in zip(run.cache.tokens, truth.tokens, strict=True)]
        self.luck, self.rng = luck, random.Random(0)

    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Guess:
        guesses = []
        for row, text, n in zip(rows, texts, most, strict=True):
            n = self.rng.randint(min(n, 1), n)  # ragged, as a draft may be
            coming = self.texts[row][len(text) : len(text) + n]
            luck = self.luck[row % len(self.luck)]
            guesses.append([t if self.rng.random() < luck else (t + 1) % 67 for t in coming])
        return Guess(guesses)


def same(found: Made, truth: Made, run: Run) -> None:
    """The same tokens, reasons and caches, which go on in the same way."""
    assert found.tokens == truth.tokens
    assert found.reasons == truth.reasons
    assert found.cache.tokens == truth.cache.tokens
    assert found.cache.tokens == [p + t for p, t in zip(run.cache.tokens, found.tokens, strict=True)]
    with torch.no_grad():
        ids = random_ids(found.cache.rows, 3, 67)
        logits, expected = (run.model(ids, cache=cache.fork()) for cache in (found.cache, truth.cache))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# -- greedy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_every_family_gives_the_greedy_tokens_with_drafts_right_never_sometimes_and_always(family: str) -> None:
    for rows in (1, 8):
        run = begin(model_of(family), ragged(rows, seed=rows), 18)
        truth = one_by_one(again(run))
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
    truth = one_by_one(again(run))
    assistant = like(model, 0.3)
    run_with = again(run, assistant_model=assistant)
    draft, schedule = draft_of(run_with)
    found = speculate(run_with, checked(draft, assistant, run), schedule)
    same(found, truth, run)
    assert 0 < found.more["speculation"].acceptance_rate < 1


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_an_early_exit_of_every_family_stays_in_step_and_the_tokens_are_the_greedy_ones(family: str) -> None:
    model = model_of(family)
    run = begin(model, PROMPTS, 12)
    truth = one_by_one(again(run))
    run_with = again(run, assistant_early_exit=1, num_assistant_tokens=3)
    draft, schedule = draft_of(run_with)
    assert isinstance(draft, Assistant)
    assert len(draft.cache.layers) == 1 and len(model.blocks) > 1
    found = speculate(run_with, checked(draft, draft.model, run), schedule)
    same(found, truth, run)


def checked(draft: Draft, assistant: Model, run: Run) -> Draft:
    """The draft, if it guesses what the assistant says in uncached passes over the whole text."""

    def ask(rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Guess:
        guess = draft(rows, texts, most)
        for row, text, n, tokens in zip(rows, texts, most, guess.tokens, strict=True):
            assert len(tokens) == n
            source = None
            if run.source is not None:
                source = assistant.encode(run.source[row, run.source[row] >= 0][None])
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
    free = one_by_one(again(run))
    run.stopping = Stopping([30] * 6, {free.tokens[0][7], free.tokens[3][11], free.tokens[4][0]})
    truth = one_by_one(again(run))
    assert "eos" in truth.reasons
    told: list[tuple[int, int, str | None]] = []
    run.told = lambda *event: told.append(event)
    for luck in (1.0, 0.7):
        told.clear()
        same(speculate(again(run, num_assistant_tokens=6), Oracle(run, free, luck)), truth, run)
        for row, tokens in enumerate(truth.tokens):
            reasons = [None] * (len(tokens) - 1) + [truth.reasons[row]]
            assert [event[1:] for event in told if event[0] == row] == list(zip(tokens, reasons, strict=True))


def test_a_cache_with_just_enough_room_is_enough() -> None:
    prompts = [row[:9] for row in PROMPTS]
    run = begin(model_of("llama"), prompts, 16, capacity=9 + 16)
    truth = one_by_one(again(run))
    found = speculate(again(run, max_new_tokens=None), Oracle(run, truth, 1.0))
    assert found.tokens == truth.tokens and found.cache.tokens == truth.cache.tokens
    assert max(found.cache.lengths) == found.cache.limit


def test_an_assistant_with_fewer_positions_drafts_as_far_as_they_go() -> None:
    run = begin(model_of("llama"), PROMPTS, 16)
    assistant = like(run.model, 0.0)
    assistant.max_positions = 14
    found = speculate(again(run, assistant_model=assistant))
    same(found, one_by_one(again(run)), run)
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
        ours = Lookup(longest)
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
        truth = one_by_one(again(run))
        if isinstance(processors[0], NoRecent):
            processors[0].texts.extend(p + t for p, t in zip(run.cache.tokens, truth.tokens, strict=True))
        same(speculate(again(run), Oracle(run, truth, 0.7)), truth, run)
    for made in (
        speculate(again(run, prompt_lookup_num_tokens=4)),
        speculate(again(run, assistant_model=like(run.model, 0.05))),
    ):
        same(made, truth, run)


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
def test_guesses_without_chance_leave_every_draw_as_it_is(family: str) -> None:
    warm = lambda scores, history: scores * 2  # noqa: E731
    run = begin(model_of(family), PROMPTS, 20, chooser=Chooser((warm,), sample=True, seed=3))
    truth = one_by_one(again(run))
    same(speculate(again(run, prompt_lookup_num_tokens=3, max_matching_ngram_size=1)), truth, run)
    found = speculate(again(run), Oracle(run, truth, 0.8))
    same(found, truth, run)
    assert found.more["speculation"].acceptance_rate > 0.5


def tiny(seed: int, vocab: int = 4) -> Model:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=16,
        vocab_size=vocab,
    )  # fmt: skip
    model = Llama.build(Config(config.to_dict()))
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.5)
    return model


def scaled(scores: Tensor, history: History) -> Tensor:
    """Sharper, and less likely the more often it has been: what a chooser's processors do to both distributions."""
    return scores * 1.3 - 0.3 * history.seen(scores.shape[-1])


def joint(model: Model, prompt: list[int], n: int) -> dict[tuple[int, ...], float]:
    """The probability of every way to go on for n tokens, from uncached passes."""
    ways = list(product(range(model.vocab), repeat=n))
    ids = torch.tensor([[*prompt, *way] for way in ways])
    logits = model(ids)
    assert logits is not None
    log_p = torch.zeros(len(ways))
    for k in range(n):
        before = ids[:, : len(prompt) + k]
        lengths = torch.full((len(ways),), before.shape[1])
        scores = scaled(logits[:, len(prompt) + k - 1].float(), History(lengths, lengths, before))
        log_p += scores.log_softmax(dim=-1).gather(1, ids[:, len(prompt) + k, None])[:, 0]
    return dict(zip(ways, log_p.exp().tolist(), strict=True))


def fits(found: Sequence[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> bool:
    """Pearson's chi-square at one in a thousand, by Wilson and Hilferty's approximation; rare ways count as one."""
    counts, n = Counter(found), len(found)
    assert abs(sum(expected.values()) - 1) < 1e-4 and set(counts) <= set(expected)
    often = [(counts[way], n * p) for way, p in expected.items() if n * p >= 8]
    rare = [(counts[way], n * p) for way, p in expected.items() if n * p < 8]
    cells = [*often, (sum(c for c, _ in rare), sum(p for _, p in rare) + 1e-9)]
    chi, free = sum((c - p) ** 2 / p for c, p in cells), len(cells) - 1
    return chi < free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3


@pytest.mark.parametrize("changes", [{}, {"assistant_confidence_threshold": 0.4}, {"num_assistant_tokens": 1}], ids=str)
def test_tokens_drawn_with_an_assistant_have_the_models_distribution(changes: dict[str, Any]) -> None:
    model, assistant, prompt, rows, n = tiny(0), tiny(1), [1, 3, 0], 3000, 4
    one = begin(model, [prompt], n)
    run = replace(
        one, cache=one.cache.repeat(rows), logits=one.logits.expand(rows, -1), prompts=[len(prompt)] * rows,
        numbers=list(range(rows)), chooser=Chooser((scaled,), sample=True, seed=11), stopping=Stopping([n] * rows),
        settings=settings(max_new_tokens=n, assistant_model=assistant, **{"num_assistant_tokens": 3} | changes),
    )  # fmt: skip
    made = speculate(run)
    expected = joint(model, prompt, n)
    assert fits([tuple(row) for row in made.tokens], expected)
    assert 0.2 < made.more["speculation"].acceptance_rate < 0.95
    assert not fits([tuple(row) for row in made.tokens], joint(assistant, prompt, n))  # the test would notice


def test_a_place_is_settled_by_the_models_distribution_whatever_the_guess_was_drawn_from() -> None:
    torch.manual_seed(0)
    N, V = 20000, 6
    numbers, positions = torch.arange(N), torch.full((N,), 5)
    chooser = Chooser(sample=True, seed=2)
    for p, q in (
        (torch.randn(V), torch.randn(V)),
        (torch.randn(V), torch.randn(V) * 5),
        (torch.tensor([0, 1, 2, -torch.inf, 0, 1]), torch.tensor([-torch.inf, 3, -torch.inf, 3, 0, 0])),
        (torch.zeros(V), torch.zeros(V)),
    ):
        scores, drawn = p.expand(N, V), q.expand(N, V)
        guesses = chooser.choose(drawn, numbers, positions, 1)
        for given in (guesses, torch.where(numbers % 2 == 0, guesses, -1)):
            found, right = settle(chooser, scores, given, drawn, numbers, positions)
            assert bool((found == given)[right].all())
            there = p.exp() > 0
            expected = {(id,): float(p.softmax(-1)[id]) for id in range(V) if there[id]}
            assert fits([(id,) for id in found.tolist()], expected)
        overlap = float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum())
        assert (
            abs(float(settle(chooser, scores, guesses, drawn, numbers, positions)[1].float().mean()) - overlap) < 0.02
        )


def test_a_row_alone_draws_what_it_draws_in_a_batch() -> None:
    model = model_of("qwen3_next")
    changes = dict(assistant_model=like(model, 0.2), assistant_confidence_threshold=0.02)
    run = begin(model, PROMPTS, 14, chooser=Chooser(sample=True, seed=5))
    together = speculate(again(run, num_assistant_tokens_schedule="heuristic", **changes))
    for row, prompt in enumerate(PROMPTS):
        alone = begin(model, [prompt], 14, chooser=run.chooser, num_assistant_tokens_schedule="heuristic", **changes)
        made = speculate(replace(alone, numbers=[row]))
        assert made.tokens[0] == together.tokens[row]
        assert made.more["speculation"] == together.more["speculation"].row(row)


# -- schedules, errors -------------------------------------------------------------------------------------------------


def test_a_schedule_learns_for_each_row_by_itself() -> None:
    schedule = Schedule(2, 5, "heuristic")
    schedule.learn(0, 5, 5)
    schedule.learn(1, 5, 4)
    assert schedule.lengths == [7, 4]
    for _ in range(40):
        schedule.learn(0, 7, 7)
        schedule.learn(1, 4, 0)
    assert schedule.lengths == [schedule.most, 1]
    schedule.learn(1, 0, 0)
    assert schedule.lengths[1] == 1
    constant = Schedule(1, 5)
    constant.learn(0, 5, 5)
    assert constant.lengths == [5] and constant.most == 5


def test_a_learning_schedule_gives_the_greedy_tokens_with_few_passes() -> None:
    model = model_of("mamba2")
    run = begin(model, PROMPTS, 40)
    truth = one_by_one(again(run))
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
    truth = one_by_one(again(run))

    def fails_at(n: int, call: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(n))

        def wrapped(*given: Any) -> Any:
            if next(calls, None) is None:
                raise KeyError("in the middle")
            return call(*given)

        return wrapped

    oracle = Oracle(run, truth, 0.7)
    broken = [
        (again(run), fails_at(3, oracle)),
        (replace(again(run), chooser=Chooser((fails_at(7, lambda scores, history: scores),))), oracle),
        (replace(again(run), stopping=SimpleNamespace(put=fails_at(17, run.stopping.select(range(3)).put))), oracle),
        (replace(again(run), told=fails_at(15, lambda *event: None)), oracle),
    ]
    for one, draft in broken:
        with pytest.raises(KeyError, match="in the middle"):
            speculate(one, draft)
        held = one.cache.tokens
        whole = [p + t for p, t in zip(run.cache.tokens, truth.tokens, strict=True)]
        assert held == [text[: len(part)] for text, part in zip(whole, held, strict=True)]
        assert any(len(part) > count for part, count in zip(held, run.prompts, strict=True))
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
        Schedule(1, 4, "often")
    with pytest.raises(InputError, match="at least 1 token long, not 0"):
        Schedule(1, 0)
    with pytest.raises(InputError, match="max_matching_ngram_size must be at least 1, not 0"):
        Lookup(0)
    with pytest.raises(InputError, match="T5, which reads a source, and there are no source ids"):
        speculate(again(run, assistant_model=model_of("t5")))
    cache = model.new_cache(1)
    logits = model(embeds=torch.zeros(1, 3, 32), cache=cache, logits="last")
    assert logits is not None
    fed = replace(run, cache=cache, logits=logits, prompts=[3], numbers=[0])
    with pytest.raises(InputError, match="row 0 holds embeddings"):
        speculate(again(fed, assistant_model=model))
    same(speculate(again(fed, prompt_lookup_num_tokens=3)), one_by_one(again(fed)), fed)


def test_an_early_exit_shares_the_weights_and_leaves_the_model_as_it_is() -> None:
    model = model_of("gemma2")
    first = early_exit(model, 2)
    assert len(first.blocks) == 2 and len(model.blocks) == 4
    assert all(a is b for a, b in zip(first.parameters(), model.parameters(), strict=False) if a.dim() == 2)
    assert first.new_cache().model is first
