"""What generate tells besides its tokens: scores, log-probabilities, how it decoded, and events as it goes."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import pytest
import torch

from lamina.errors import InputError
from lamina.generation import Chat, Event, History, Result
from lamina.model import Model
from tests.families.harness import pair
from tests.generation.text import reader, tokenizer, unreadable

PROMPTS = [[5, 9, 12, 3, 44, 8, 21], [7], [30, 31, 32]]
NEW = 6
DRAFTS: list[dict[str, Any]] = [{}, dict(prompt_lookup_num_tokens=3), dict(use_cache=False)]
however = pytest.mark.parametrize("how", DRAFTS, ids=["plain", "drafted", "uncached"])


@pytest.fixture(scope="module")
def model() -> Model:
    return pair("llama", "grouped")[1]


WORDS: dict[str, Any] = dict(eos_token_id=(), suppress_tokens=unreadable(), no_repeat_ngram_size=2)


def texts() -> list[list[int]]:
    return [tokenizer().encode(text) for text in ("the theory of", "http", "they think naïve 😀")]


# -- scores ------------------------------------------------------------------------------------------------------------


@however
def test_scores_are_what_the_tokens_were_chosen_from(model: Model, how: dict[str, Any]) -> None:
    settings: dict[str, Any] = dict(repetition_penalty=1.4, suppress_tokens=[4], output_scores=True, output_logits=True)
    free = model.generate(PROMPTS, NEW, eos_token_id=(), repetition_penalty=1.4, suppress_tokens=[4])
    ends = [free.tokens[0][2]]
    result = model.generate(PROMPTS, NEW, eos_token_id=ends, **settings, **how)
    assert "eos" in result.reasons and "length" in result.reasons
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, result.tokens, strict=True)):
        assert result.logits[row].shape == result.scores[row].shape == (len(tokens), model.vocab)
        assert result.scores[row].argmax(dim=-1).tolist() == tokens
        assert (result.scores[row][:, 4] == -torch.inf).all()
        truth = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(result.logits[row], truth, rtol=1e-4, atol=1e-4)


@however
@pytest.mark.parametrize("top", [0, 3, 500])
def test_log_probabilities_are_the_model_s_own(model: Model, top: int, how: dict[str, Any]) -> None:
    sampled: dict[str, Any] = dict(do_sample=True, seed=1, top_k=0, eos_token_id=())
    result = model.generate(PROMPTS, NEW, logprobs=top, **sampled, **how)
    for prompt, tokens, found in zip(PROMPTS, result.tokens, result.logprobs, strict=True):
        truth = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        assert [one.token for one in found] == tokens
        for one, shares in zip(found, truth, strict=True):
            assert one.logprob == pytest.approx(float(shares[one.token]), abs=1e-4)
            best = shares.sort(descending=True, stable=True)
            assert len(one.top) == min(top, model.vocab)
            assert [share for _, share in one.top] == pytest.approx(best.values[:top].tolist(), abs=1e-4)
            assert [token for token, _ in one.top][:2] == best.indices[: min(top, 2)].tolist()


def test_what_was_not_asked_for_says_how_to_ask(model: Model) -> None:
    result = model.generate(PROMPTS, 2)
    for name, text in (
        ("scores", "output_scores=True"),
        ("logits", "output_logits=True"),
        ("logprobs", "logprobs=0, or with logprobs=5"),
        ("text", "no tokenizer: read result.tokens"),
    ):
        with pytest.raises(InputError, match=text):
            getattr(result, name)
    only = model.generate(PROMPTS, 2, logprobs=1)
    with pytest.raises(InputError, match="scores were not kept"):
        _ = only.scores


def test_a_result_says_how_its_tokens_were_made(model: Model) -> None:
    assert model.generate(PROMPTS, 2).how == "one native program a step"
    assert model.generate(PROMPTS, 2, do_sample=True).how == "one native program a step"
    assert (
        model.generate(PROMPTS, 2, use_cache=False).how
        == "plain passes, since without a cache every pass recomputes whole rows"
    )
    several = "plain passes of several tokens, since the model is on cpu; decode steps are captured on a GPU"
    assert model.generate(PROMPTS, 2, prompt_lookup_num_tokens=2).how == several
    result = model.generate(PROMPTS, 3, eos_token_id=())
    assert result.timing.prompt_tokens == 11 and result.timing.new_tokens == 9
    assert result.timing.tokens_per_second > 0


def test_rows_ended_by_a_stop_string_a_function_or_a_length_say_so() -> None:
    model = reader()
    free = model.generate(texts(), 12, **WORDS)
    word = free.text[0][3:6]
    assert word not in free.text[1][:6] + free.text[2]

    def stop(row: int, tokens: list[int], text: str) -> bool:
        assert text == tokenizer().decode(tokens)
        return row == 1 and len(tokens) == 4

    result = model.generate(texts(), 12, stop_strings=word, stop=stop, **WORDS)
    assert result.reasons == ["stop", "stop", "length"]
    assert result.text == [free.text[0][:3], tokenizer().decode(free.tokens[1][:4]), free.text[2]]
    assert result.cache.tokens == [p + t for p, t in zip(texts(), result.tokens, strict=True)]
    assert set(model.generate(texts(), 12, max_time=1e-9, **WORDS).reasons) == {"time"}


def test_a_processor_of_the_caller_s_sees_scores_and_history(model: Model) -> None:
    seen: list[list[list[int]]] = []

    def never_twice(scores: torch.Tensor, history: History) -> torch.Tensor:
        seen.append([row[row >= 0].tolist() for row in history.ids])
        return scores.masked_fill(history.seen(scores.shape[-1]) > 0, -torch.inf)

    result = model.generate(PROMPTS, NEW, eos_token_id=(), logits_processor=never_twice)
    for prompt, tokens in zip(PROMPTS, result.tokens, strict=True):
        assert len(set(prompt + tokens)) == len(set(prompt)) + NEW
    assert seen[0] == PROMPTS and seen[2] == [p + t[:2] for p, t in zip(PROMPTS, result.tokens, strict=True)]
    assert result.tokens == model.generate(PROMPTS, NEW, eos_token_id=(), no_repeat_ngram_size=1).tokens


# -- events ------------------------------------------------------------------------------------------------------------


def check_events(events: list[Event], result: Result) -> None:
    for row, tokens in enumerate(result.tokens):
        mine = [event for event in events if event.row == row]
        assert [event.token for event in mine] == tokens
        assert [event.reason for event in mine] == [None] * (len(tokens) - 1) + [result.reasons[row]]
        assert "".join(event.text for event in mine) == result.text[row]


EVENTS: dict[str, dict[str, Any]] = {
    "greedy": dict(),
    "sampled": dict(do_sample=True, seed=2, num_return_sequences=2),
    "drafted": dict(prompt_lookup_num_tokens=4),
    "uncached": dict(use_cache=False),
    "two ends": dict(eos_token_id=[2, 40]),
    "beams": dict(num_beams=3, num_return_sequences=2),
}


@pytest.mark.parametrize("name", EVENTS)
def test_streams_and_listeners_tell_what_generate_gives(name: str) -> None:
    model, settings = reader(), EVENTS[name]
    expected = model.generate(texts(), 12, **settings)

    async def read() -> list[Event]:
        return [event async for event in model.stream(texts(), 12, **settings)]

    stream = model.stream(texts(), 12, **settings)
    told: list[Event] = []
    listened = model.generate(texts(), 12, stream=told.append, **settings)
    for events in (list(stream), asyncio.run(read()), told):
        check_events(events, expected)
    assert stream.result.tokens == listened.tokens == expected.tokens


def test_events_end_where_the_stop_string_begins() -> None:
    model = reader()
    free = model.generate(texts(), 16, **WORDS)
    for row, (text, how) in enumerate(zip(free.text, DRAFTS, strict=True)):
        for start, end in ((0, 1), (2, 6), (4, 11)):
            stop = text[start:end]
            others = [text[start + 1 : end] + "?!", text[:2] + "!?"]  # may be begun and are never whole
            result = model.generate(texts(), 16, stop_strings=[stop, *others], **WORDS, **how)
            assert result.reasons[row] == "stop" and result.text[row] == text[: text.index(stop)]
            check_events(list(model.stream(texts(), 16, stop_strings=[stop, *others], **WORDS, **how)), result)


def test_a_stream_tells_errors_when_it_is_read() -> None:
    with pytest.raises(InputError, match="there is no parameter 'temprature'"):
        list(reader().stream("the", 4, temprature=1))


# -- chats -------------------------------------------------------------------------------------------------------------


def test_a_sampled_chat_of_several_turns_says_what_generate_says() -> None:
    model = reader()
    settings: dict[str, Any] = dict(do_sample=True, seed=5, top_k=8, max_new_tokens=7, stop_strings=list("aeiot"))
    settings["suppress_tokens"] = unreadable()
    chat = Chat(model, "the thing", **settings)
    stopped: list[str] = []
    for turn, text in enumerate(("a theory", "http", "naïve 😀", "they")):
        messages = [*chat.messages, {"role": "user", "content": text}]
        expected = model.generate(messages, **settings)
        if turn % 2:
            assert "".join(event.text for event in chat.stream(text)) == expected.text[0]
        else:
            assert chat.send(text).tokens == expected.tokens
        assert chat.messages == [*messages, {"role": "assistant", "content": expected.text[0]}]
        assert (chat.reused > 0) == (turn > 0)
        stopped.append(expected.reasons[0])
    assert "stop" in stopped


# -- results in a few words --------------------------------------------------------------------------------------------


def test_a_result_is_shown_in_a_few_words_however_much_it_holds(model: Model) -> None:
    result = model.generate(PROMPTS[:1], 2, eos_token_id=())
    assert repr(result) == f"Result(1 row: 2 tokens, length, {result.tokens[0]})"
    many = Result([[1]] * 5000, [[7] * 5000] * 5000, ["eos"] * 5000)
    one = "5000 tokens, eos, [7, 7, 7, 7, 7, 7, 7, 7, …]"
    assert str(many) == f"Result(5000 rows: {one}; {one}; {one}; …)"
    text = reader().generate(["the theory", "http"], 40, **WORDS, stop_strings=["zz"])
    assert len(repr(text)) < 250
    begins = [re.escape(repr(row[:20])[1:-1]) for row in text.text]
    assert re.fullmatch(rf"Result\(2 rows: 40 tokens, \w+, ['\"]{begins[0]}.*…['\"]; .*{begins[1]}.*\)", repr(text))
    cut = dataclasses.replace(text, tokens=[row[:6] for row in text.tokens], _cuts=[2, 0])
    assert repr(cut) == f"Result(2 rows: 6 tokens, length, {cut.text[0]!r}; 6 tokens, length, '')"
    assert repr(Result([], [], [])) == "Result(0 rows)"
