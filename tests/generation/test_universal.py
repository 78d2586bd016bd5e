"""An assistant with another tokenizer: the tokens are those of plain decoding, and its guesses arrive as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lamina.checkpoint import Tokenizer
from lamina.errors import InputError
from lamina.generation.strategies.cross_tokenizer import CrossTokenizerAssistant
from lamina.generation.strategies.drafts import Assistant, Draft, Drafter
from lamina.generation.strategies.plain import decode_plain
from lamina.generation.strategies.speculation import drafter_of, speculate
from lamina.model import Model
from lamina.sampling.chooser import Chooser
from tests.generation.drafted import FAMILIES, again, begin, like, model_of, same
from tests.generation.test_smollm2 import ours as smollm2
from tests.generation.vocabularies import few, llama, reads, with_permuted_ids

ENGLISH = "the theory of everything is about things in the universe, quickly jumped over vexed"
GERMAN = "zwei boxen voller wein und quark jagen gymnasten neben dem see, sagte der lehrer als er ging. haben sie"
PROMPTS = [[5, 9, 12, 3, 44, 8, 21, 9, 12], [7], [30, 31, 32]]
ENDLESS: dict[str, Any] = {"eos_token_id": []}


def checked(draft: Drafter) -> Drafter:
    """The draft, if the assistant's cache holds what it should, and it guesses what it says in uncached passes."""
    assert isinstance(draft, CrossTokenizerAssistant)

    def ask(rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Draft:
        guess = draft(rows, texts, most)
        for number, text, n, tokens in zip(rows, texts, most, guess.tokens, strict=True):
            row = draft.rows[number]
            assert draft.theirs.decode(row.ids) == draft.ours.decode(text)
            if n:
                held = draft.cache.tokens[number]
                assert held == row.ids + row.more
                logits = draft.model(torch.tensor([held]))
                assert logits is not None
                said = logits[0, len(row.ids) - 1 :].argmax(dim=-1).tolist()
                assert said[:-1] == row.more
                whole = draft.theirs.decode([*row.ids, *said])[len(draft.theirs.decode(row.ids)) :]
                assert whole.startswith(draft.ours.decode(tokens)) and len(tokens) <= n
        return guess

    return ask


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_an_assistant_of_every_family_stays_in_step_and_the_tokens_are_the_greedy_ones(family: str) -> None:
    model = reads(model_of("llama"), few(ENGLISH))
    run = begin(model, PROMPTS, 12, prefill_chunk=4)
    run_with = again(run, assistant_model=reads(model_of(family), few(GERMAN)), num_assistant_tokens=3)
    draft, lengths = drafter_of(run_with)
    found = speculate(run_with, checked(draft), lengths)
    same(found, decode_plain(again(run)), run)
    assert sum(found.more["speculation"].drafted) > 12


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2", "qwen3_next", "lfm2"])
def test_the_model_itself_with_other_ids_for_its_tokens_is_always_right(family: str) -> None:
    model = reads(model_of(family), few())
    run = begin(model, PROMPTS, 20)
    truth = decode_plain(again(run))
    run_with = again(run, assistant_model=with_permuted_ids(model))
    draft, lengths = drafter_of(run_with)
    found = speculate(run_with, checked(draft), lengths)
    same(found, truth, run)
    stats = found.more["speculation"]
    assert stats.acceptance_rate == 1
    assert stats.passes == [4] * 3  # the first token comes with the prompt; then 5, 5, 5, and 4 that end it


@pytest.mark.parametrize("family", ["gemma2", "mamba2", "falcon_h1"])
def test_where_the_assistant_cannot_go_back_far_enough_it_reads_on_or_anew(family: str) -> None:
    model = reads(model_of("llama"), few(ENGLISH))
    run = begin(model, PROMPTS, 14)
    assistant = reads(model_of(family), few(GERMAN))
    run_with = again(run, assistant_model=assistant, num_assistant_tokens=2, assistant_lookbehind=0)
    draft, lengths = drafter_of(run_with)
    same(speculate(run_with, checked(draft), lengths), decode_plain(again(run)), run)
    draft, _ = drafter_of(again(run, assistant_model=assistant))
    assert isinstance(draft, CrossTokenizerAssistant)
    text = run.cache.tokens[0]
    first = draft([0], [text], [2]).tokens
    row = draft.rows[0]
    row.replace(len(row.ids), [1, 2, 3])  # as far back as no slack goes
    draft([0], [text], [2])
    assert draft.cache.tokens[0][:3] == [1, 2, 3]
    row.replace(3, draft._encoded(model.tokenizer.decode(text)))  # type: ignore[union-attr]
    assert draft([0], [text], [2]).tokens == first


@pytest.mark.parametrize(("target", "assistant"), [("bytes", "other bytes"), ("bytes", "pieces"), ("pieces", "bytes")])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 3, "temperature": 0.7}], ids=str)
def test_texts_of_many_kinds_go_on_as_without_an_assistant(
    target: str, assistant: str, settings: dict[str, Any]
) -> None:
    """The models are random, so the rows are full of characters that are not whole."""
    model, other = llama(target), llama(assistant, seed=1)
    prompts = ["the theory of", "日本語 naïve 😀👩 one two", "unbeliev"]
    plain = model.generate(prompts, 14, **ENDLESS, **settings)
    drafted = {"assistant_confidence_threshold": 0.0, "num_assistant_tokens": 4} | settings
    for one in (other, with_permuted_ids(model)):
        found = model.generate(prompts, 14, assistant_model=one, **ENDLESS, **drafted)
        assert found.tokens == plain.tokens and found.text == plain.text
        assert sum(found.speculation.drafted) > 10
    if target == "bytes" and not settings:
        assert found.speculation.acceptance_rate > 0.1
    assert found.how.endswith("; drafts converted through text, since the assistant has another tokenizer")


@pytest.mark.parametrize(
    "settings",
    [
        {"stop_strings": ["e", "本"]},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        {"num_assistant_tokens_schedule": "heuristic", "target_lookbehind": 1},
        {"target_lookbehind": 0, "assistant_lookbehind": 0, "max_length": 24},
        {"num_return_sequences": 3, "do_sample": True, "seed": 1},
        {"eos_token_id": list(range(0, 300, 9))},
        {"output_scores": True, "logprobs": 2},
        {"use_cache": False},
    ],
    ids=str,
)
def test_settings_and_streams_do_not_notice_it(settings: dict[str, Any]) -> None:
    model, other = llama("bytes"), with_permuted_ids(llama("bytes"))
    length = {} if "max_length" in settings else {"max_new_tokens": 16}
    prompts = ["the theory of", "日本語"]
    own = {name: value for name, value in settings.items() if "lookbehind" not in name and "assistant" not in name}
    plain = model.generate(prompts, **ENDLESS | length | own)
    events: list[Any] = []
    drafted: dict[str, Any] = {"assistant_model": other, "assistant_confidence_threshold": 0.0}
    found = model.generate(prompts, **ENDLESS | length | drafted | settings, stream=events.append)
    assert (found.tokens, found.reasons, found.text) == (plain.tokens, plain.reasons, plain.text)
    for row, tokens in enumerate(plain.tokens):
        assert [event.token for event in events if event.row == row] == tokens
        assert "".join(event.text for event in events if event.row == row) == plain.text[row]


def test_a_row_goes_on_in_its_cache_and_begins_from_nothing() -> None:
    model, other = llama("other bytes"), with_permuted_ids(llama("other bytes"))
    drafted: dict[str, Any] = {"assistant_model": other, "assistant_confidence_threshold": 0.0, **ENDLESS}
    first, plain = model.generate("the", 5, **drafted), model.generate("the", 5, **ENDLESS)
    for _ in range(2):
        first = model.generate([[40, 41]], 5, cache=first.cache, **drafted)
        plain = model.generate([[40, 41]], 5, cache=plain.cache, **ENDLESS)
        assert first.tokens == plain.tokens
    assert model.generate(None, 8, **drafted).tokens == model.generate(None, 8, **ENDLESS).tokens  # <s> alone


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_only_what_is_new_is_read_by_the_assistant(family: str) -> None:
    model = reads(model_of("llama"), few(ENGLISH))
    prompts = [[(7 * n + row) % 67 for n in range(60)] for row in range(2)]
    run = begin(model, prompts, 14, assistant_model=reads(model_of(family), few(GERMAN)))
    draft, lengths = drafter_of(run)
    assert isinstance(draft, CrossTokenizerAssistant)
    read, read_rows = [], draft.reader.read_rows

    def counted(tokens: Sequence[Sequence[int]], *more: Any) -> torch.Tensor:
        read.append(max(map(len, tokens)))
        return read_rows(tokens, *more)

    draft.reader.read_rows = counted  # type: ignore[method-assign]
    speculate(run, checked(draft), lengths)
    assert read[0] > 60 and len(read) > 8
    assert max(read[1:]) <= 6


# -- guesses -----------------------------------------------------------------------------------------------------------


class Says:
    """Stands for an assistant's scores: whatever it has read, it goes on with these tokens."""

    def __init__(self, draft: CrossTokenizerAssistant, tokens: list[int]) -> None:
        self.tokens, self.vocab = iter(tokens), draft.model.vocab
        draft.reader.read_rows = self.read  # type: ignore[method-assign]
        draft.reader.read_all = self.read  # type: ignore[method-assign]

    def read(self, *given: Any) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([next(self.tokens)]), self.vocab).float() * 99


def guess(text: list[int], said: list[int], target: str = "bytes", assistant: str = "other bytes") -> list[int]:
    """What the model is told when its row holds `text` and the assistant says these tokens of its own."""
    model = llama(target)
    draft, _ = drafter_of(begin(model, [text], 9, assistant_model=llama(assistant), num_assistant_tokens=len(said)))
    assert isinstance(draft, CrossTokenizerAssistant)
    Says(draft, said)
    return draft([0], [text], [len(said)]).tokens[0]


def test_guesses_are_tokenized_as_the_model_would_behind_its_row() -> None:
    ours, theirs = llama("bytes").tokenizer, llama("other bytes").tokenizer
    assert ours is not None and theirs is not None
    row, said = ours.encode("the theory of"), theirs.encode(" the thing", special=False)
    assert guess(row, said) == ours.encode("the theory of the thing")[len(row) :]
    assert guess(row, said, "bytes", "other bytes") != said


def test_a_guess_holds_back_half_a_character_and_completes_the_one_that_the_row_ends_in() -> None:
    ours, theirs = llama("bytes").tokenizer, llama("other bytes").tokenizer
    assert ours is not None and theirs is not None
    smile = theirs.encode("😀", special=False)
    assert len(smile) > 1
    row = ours.encode("the")
    assert ours.decode(guess(row, [*smile, *smile[:-1]])) == "😀"
    bird = [*ours.encode("the🐦")]
    assert ours.decode(bird[:-1]).endswith("\N{REPLACEMENT CHARACTER}")
    assert guess(bird[:-1], theirs.encode("🐦", special=False)) == bird[-1:]
    assert guess(bird[:-1], theirs.encode("a bird", special=False)) == []


def test_the_token_that_ends_the_assistants_texts_becomes_the_models() -> None:
    ours, theirs = llama("bytes").tokenizer, llama("other bytes").tokenizer
    assert ours is not None and theirs is not None
    said = theirs.encode(" of", special=False)
    assert guess(ours.encode("the"), [*said, *theirs.eos_ids, 5]) == [*ours.encode(" of"), *ours.eos_ids]
    row = [ours.bos_id, *ours.encode("the")]  # <|im_start|>, which the assistant does not know, is left out in front
    draft, _ = drafter_of(begin(llama("bytes"), [row], 9, assistant_model=llama("other bytes")))
    draft([0], [row], [1])
    assert isinstance(draft, CrossTokenizerAssistant)
    assert draft.rows[0].ids == theirs.encode("the") and theirs.decode(draft.rows[0].ids) == "the"


def test_a_guess_ends_where_the_assistant_is_less_sure_or_has_no_more_positions() -> None:
    model, other = reads(model_of("llama"), few()), reads(like(model_of("llama"), 0.0), few())
    other = with_permuted_ids(other)
    run = begin(model, PROMPTS, 16)
    texts = [[*text, 1] for text in run.cache.tokens]
    draft, _ = drafter_of(again(run, assistant_model=other, assistant_confidence_threshold=1.0))
    assert [len(one) for one in draft([0, 1, 2], texts, [4, 4, 4]).tokens] == [1, 1, 1]
    other.max_positions = 14
    found = speculate(again(run, assistant_model=other))
    same(found, decode_plain(again(run)), run)
    assert found.more["speculation"].drafted == [4, 4 + 4 + 3, 4 + 4 + 1]  # the last guess is made of 14 tokens


def test_an_assistant_that_reads_a_source_reads_its_text() -> None:
    model = reads(model_of("t5"), few())
    run = begin(model, PROMPTS, 12)
    truth = decode_plain(again(run))
    found = speculate(again(run, assistant_model=with_permuted_ids(model)))
    same(found, truth, run)
    assert found.more["speculation"].acceptance_rate > 0.9
    other = begin(reads(model_of("llama"), few()), PROMPTS, 4)
    with pytest.raises(InputError, match="T5, which reads a source, and there are no source ids"):
        speculate(again(other, assistant_model=with_permuted_ids(model)))


# -- which assistants --------------------------------------------------------------------------------------------------


def test_the_vocabulary_decides_whether_guesses_go_by_way_of_text() -> None:
    model = reads(model_of("llama"), few(ENGLISH))
    for other, kind in [
        (reads(model_of("gemma2"), few(ENGLISH)), Assistant),
        (reads(model_of("gemma2"), Tokenizer(few(ENGLISH).backend)), Assistant),
        (model_of("gemma2"), Assistant),  # without a tokenizer, and with as many ids
        (reads(model_of("gemma2"), few(GERMAN)), CrossTokenizerAssistant),  # as many ids, and others
    ]:
        draft, _ = drafter_of(begin(model, PROMPTS, 3, assistant_model=other))
        assert type(draft) is kind


def test_without_two_tokenizers_vocabularies_of_other_sizes_are_refused_in_words() -> None:
    model, other = model_of("llama"), llama("bytes")
    with pytest.raises(
        InputError, match="vocabulary of 316 ids and the model one of 67, and without a tokenizer of the model drafts"
    ):
        model.generate([[1]], 2, assistant_model=other)
    with pytest.raises(
        InputError, match="of 67 ids and the model one of 316, and without a tokenizer of the assistant"
    ):
        other.generate("the", 2, assistant_model=model)
    with pytest.raises(InputError, match="target_lookbehind=3 does nothing without an assistant"):
        other.generate("the", 2, target_lookbehind=3, prompt_lookup_num_tokens=3)
    with pytest.raises(InputError, match="assistant_lookbehind=-1: it must be a whole number, at least 0"):
        other.generate("the", 2, assistant_lookbehind=-1, assistant_model=other)
    with pytest.raises(InputError, match=r"assistant_tokenizer .* set assistant_model.tokenizer"):
        other.generate("the", 2, assistant_tokenizer=None, assistant_model=other)
    cache = other.new_cache(1)
    other(embeds=torch.zeros(1, 3, 32), cache=cache)
    with pytest.raises(InputError, match="row 0 holds embeddings"):
        other.generate("the", 2, cache=cache, assistant_model=llama("pieces"))


@pytest.mark.parametrize("sample", [False, True])
def test_tables_of_other_sizes_over_one_vocabulary_share_ids(sample: bool) -> None:
    """As the sizes of one family often have: rows that no token uses are padding."""
    model = reads(model_of("llama"), few())
    run = begin(model, PROMPTS, 12, chooser=Chooser(sample=sample, seed=4))
    truth = decode_plain(again(run))
    for rows in (60, 80):
        other = with_rows(model, rows)
        assert other.vocab == rows
        found = speculate(again(run, assistant_model=other))
        if not sample:
            same(found, truth, run)
        assert found.more["speculation"].acceptance_rate > (0.4 if rows < 67 else 0.9 if sample else 0.999)


def with_rows(model: Model, rows: int) -> Model:
    """The same model with a longer or shorter table."""
    other = with_permuted_ids(model)
    assert model.tokenizer is not None
    for module, resized in zip(model.modules(), other.modules(), strict=True):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.shape[0] == model.vocab:
                more = parameter.new_zeros(max(rows - model.vocab, 0), *parameter.shape[1:])
                resized._parameters[name] = torch.nn.Parameter(torch.cat([parameter[:rows], more - 1]), False)
    other.vocab, other.tokenizer = rows, Tokenizer(model.tokenizer.backend)
    return other


# -- a real model ------------------------------------------------------------------------------------------------------


def test_smollm2_under_other_ids_guesses_what_smollm2_says() -> None:
    model = smollm2()
    prompts = ["The capital of France is", "一、二、三、"]
    drafted: dict[str, Any] = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}
    plain = model.generate(prompts, 11, **ENDLESS)
    found = model.generate(prompts, 11, assistant_model=with_permuted_ids(model), **drafted, **ENDLESS)
    assert found.tokens == plain.tokens
    stats = found.speculation
    assert stats.acceptance_rate > 0.9 and stats.tokens_per_pass > 2
