"""Continuing caches with whole sequences, and chats that stand on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lamina.cache import Cache
from lamina.errors import InputError
from lamina.generation.chat import Chat
from lamina.generation.continuation import continuation
from lamina.model import Model
from lamina.models.llama import Llama
from tests.families.cases import FIRST
from tests.families.harness import TOLERANCE, pair, relative
from tests.families.test_t5 import FIRST as T5_FIRST
from tests.families.test_t5 import pair as t5_pair
from tests.generation.text import CHATML, reader, tokenizer


def fed(model: Model, rows: list[list[int]], slack: int) -> Any:
    """A cache that holds these rows."""
    cache = model.new_cache(len(rows), slack=slack)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    model(ids, cache=cache, counts=[len(row) for row in rows])
    return cache


def begun(cache: Cache, prompts: list[list[int]], whole: bool | None = True) -> tuple[list[int], list[list[int]]]:
    """Makes the cache ready; how much of each prompt it holds, and what is left to feed."""
    plan = continuation(cache, prompts, whole)
    plan.begin(cache)
    return plan.reused, plan.rest


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize(("family", "name"), FIRST, ids=[f for f, _ in FIRST])
def test_what_a_cache_holds_is_not_fed_again_and_changes_nothing(family: str, name: str, slack: int) -> None:
    model, rng = pair(family, name)[1], random.Random(slack)

    def some(n: int) -> list[int]:
        return [rng.randrange(model.vocab) for _ in range(n)]

    held = [some(n) for n in (9, 12, 5, 7, 30)]
    wanted = [held[0] + some(4), [*held[1][:10], 66, *some(3)], held[2], held[3][:4], some(6)]
    wanted[4][0] = (held[4][0] + 1) % model.vocab
    cache = fed(model, held, slack)
    possible = cache.rewindable.tolist()
    reused, rest = begun(cache, wanted)
    for row, (back, at) in enumerate(((0, 9), (2, 10), (0, 5), (4, 3), (30, 0))):
        assert reused[row] == (at if back <= possible[row] else 0)
    assert [ids[:n] for ids, n in zip(wanted, reused, strict=True)] == cache.tokens
    assert [a + b for a, b in zip(cache.tokens, rest, strict=True)] == wanted
    assert rest[2] == []
    counts = [len(ids) for ids in rest]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in rest], batch_first=True)
    model(ids, cache=cache.poison(), counts=counts, logits="last")
    for row, sequence in enumerate(wanted):
        assert relative(cache.logits[row], model(torch.tensor([sequence]), logits="last")[0]) < TOLERANCE


def test_the_last_token_is_fed_again_where_its_logits_are_not_there() -> None:
    model = reader()
    cache = fed(model, [[5, 6, 7]], 0)
    assert begun(cache, [[5, 6, 7]]) == ([3], [[]])
    cache.rewind(1)
    assert begun(cache, [[5, 6]]) == ([1], [[6]])
    assert cache.tokens == [[5]]


def test_embedded_tokens_are_never_recognised() -> None:
    model = reader()
    cache = model.new_cache()
    model(embeds=model.embed(torch.tensor([[5, 6]])), cache=cache)
    assert begun(cache, [[5, 6, 7]]) == ([0], [[5, 6, 7]])


def test_looking_changes_nothing_and_an_empty_prompt_goes_on() -> None:
    cache = fed(reader(), [[5, 6], [7, 8]], 0)
    assert begun(cache.fork(), [[9], []], None) == ([0, 0], [[9], []])
    continuation(cache, [[1], [7]], True)
    assert cache.tokens == [[5, 6], [7, 8]]
    with pytest.raises(InputError, match="prompt 0 is empty, and so is its row"):
        continuation(cache.reset([0]), [[], [1]])


def test_prompts_are_taken_as_whole_where_they_begin_like_the_row() -> None:
    cache = fed(reader(), [[5, 6, 7, 8]], 0)
    assert begun(cache.fork(), [[5, 6, 7, 8, 9]], None) == ([4], [[9]])
    assert begun(cache.fork(), [[5, 6]], None) == ([1], [[6]])
    assert begun(cache.fork(), [[5, 6, 1, 2]], None) == ([2], [[1, 2]])
    assert begun(cache.fork(), [[5, 1, 2, 3]], None) == ([0], [[5, 1, 2, 3]])
    assert begun(cache.fork(), [[5, 6]], False) == ([0], [[5, 6]])


# -- chats -------------------------------------------------------------------------------------------------------------

Ask = Callable[[Chat, str], str]


def send(chat: Chat, text: str) -> str:
    return chat.send(text).text[0]


def stream(chat: Chat, text: str) -> str:
    events = list(chat.stream(text))
    assert [event.reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].reason in ("eos", "length")
    return "".join(event.text for event in events)


@pytest.mark.parametrize("ask", [send, stream])
def test_every_turn_equals_generating_from_the_whole_conversation(ask: Ask) -> None:
    model = reader()
    chat = Chat(model, system="the thing", max_new_tokens=6)
    messages: list[dict[str, str]] = [{"role": "system", "content": "the thing"}]
    for turn, text in enumerate(["a theory", "http://", "naïve 😀"]):
        messages.append({"role": "user", "content": text})
        ids = tokenizer().encode(tokenizer().chat(messages), special=False)
        expected = model.generate([ids], 6)
        said = ask(chat, text)
        assert said == expected.text[0]
        assert chat.cache.tokens[0][-len(expected.tokens[0]) :] == expected.tokens[0]
        messages.append({"role": "assistant", "content": said})
        assert chat.messages == messages
        assert (chat.reused > 0) == (turn > 0)


def test_only_new_tokens_are_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reader()
    chat = Chat(model, max_new_tokens=4)
    chat.send("the theory of the thing is that they think")
    held, passes, forward = len(chat.cache.tokens[0]), [], Llama.forward

    def counted(self: Llama, ids: torch.Tensor, *rest: Any, **how: Any) -> Any:
        passes.append(ids.numel())
        return forward(self, ids, *rest, **how)

    monkeypatch.setattr(Llama, "forward", counted)
    chat.send("x")
    prompt = tokenizer().encode(tokenizer().chat(chat.messages[:-1]), special=False)
    assert chat.reused >= held - 4
    assert passes[0] == len(prompt) - chat.reused


def test_a_template_that_changes_what_was_said_takes_the_cache_back() -> None:
    model = reader()
    model_tokenizer = model.tokenizer
    assert model_tokenizer is not None
    template = CHATML.replace("message['content'] +", "message['content'] + (loop.last | string) +")
    model_tokenizer.templates["changing"] = template
    chat = Chat(model, chat_options={"template": "changing"}, max_new_tokens=4)
    chat.send("the thing")
    first = len(tokenizer().encode("<|im_start|>user\nthe thing"))
    answer = chat.send("they think")
    assert first <= chat.reused < first + 3
    ids = tokenizer().encode(tokenizer().chat(chat.messages[:-1], template="changing"), special=False)
    assert answer.tokens == model.generate([ids], 4).tokens


def test_a_cancelled_answer_is_what_was_said_and_the_chat_goes_on() -> None:
    model = reader()
    chat = Chat(model, max_new_tokens=120)
    for n, _ in enumerate(chat.stream("the thing")):
        if n == 2:
            break
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    ids = tokenizer().encode(tokenizer().chat(chat.messages[:1]), special=False)
    held = chat.cache.tokens[0]
    assert held[: len(ids)] == ids and len(held) < len(ids) + 120
    assert held[len(ids) :] == model.generate([ids], 120).tokens[0][: len(held) - len(ids)]
    answer = chat.send("they think")
    whole = tokenizer().encode(tokenizer().chat(chat.messages[:-1]), special=False)
    assert answer.tokens == model.generate([whole], 120).tokens


def test_a_failed_turn_leaves_the_conversation_as_it_was() -> None:
    model = reader()
    chat = Chat(model, max_new_tokens=4, cache=model.new_cache(capacity=30))
    chat.send("a")
    messages, held = list(chat.messages), chat.cache.tokens
    with pytest.raises(Exception, match="capacity is 30"):
        chat.send("the theory of the thing" * 3)
    with pytest.raises(Exception, match="capacity is 30"):
        list(chat.stream("the theory of the thing" * 3))
    assert chat.messages == messages
    assert held[0][: len(chat.cache.tokens[0])] == chat.cache.tokens[0]


def test_chats_refuse_what_cannot_be() -> None:
    model = reader()
    with pytest.raises(InputError, match="no tokenizer, so there is nothing to chat with"):
        Chat(pair("llama", "grouped")[1])
    with pytest.raises(InputError, match="T5 reads a source and cannot chat"):
        t5 = t5_pair(T5_FIRST)[1]
        t5.tokenizer = tokenizer()
        try:
            Chat(t5)
        finally:
            t5.tokenizer = None
    with pytest.raises(InputError, match=r"a chat has one row, and the cache has 2: give cache.select\(\[row\]\)"):
        Chat(model, cache=model.new_cache(2))
    with pytest.raises(InputError, match="there is no parameter 'max_tokens'; the nearest known one is"):
        Chat(model, max_tokens=3)
    with pytest.raises(InputError, match="num_return_sequences=2: a chat goes on from one answer"):
        Chat(model, num_return_sequences=2, do_sample=True)
    with pytest.raises(InputError, match="use_cache=False: a chat goes on from its cache"):
        Chat(model, use_cache=False)
    chat = Chat(model)
    open_stream = chat.stream("a")
    with pytest.raises(InputError, match="an answer is still being streamed"):
        chat.send("b")
    open_stream.cancel()
    chat.send("b")
