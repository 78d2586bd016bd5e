"""`Chat`: a conversation that keeps its KV cache between turns.

    chat = Chat(model, system="Answer in one sentence.", max_new_tokens=200)
    print(chat.send("Why is the sky blue?").text[0])
    for event in chat.stream("And at dusk?"):
        print(event.text, end="")

Every turn renders the whole conversation with the checkpoint's chat template and feeds the tokens that the cache does
not hold: usually just the new message. If the template changes earlier text, the cache is rewound to the first change.

The conversation contains the text that the reader has read. If the reader leaves a stream early, the answer is the text
of the events read so far. The producer may be ahead of the reader; the next turn rewinds the cache to that text.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from lamina.cache.cache import Cache
from lamina.checkpoint.chat.messages import check_content
from lamina.errors import InputError
from lamina.generation.prompt import prompt_of
from lamina.generation.result import Result
from lamina.generation.settings.options import AllOptions
from lamina.generation.settings.settings import settings_of
from lamina.generation.stream import Emit, Event, Stream

if TYPE_CHECKING:
    from lamina.model import Model


Content = str | Sequence[Mapping[str, Any]]
"""A message's content: text, or text parts like [{"type": "text", "text": "…"}]."""


@dataclass
class _Answer:
    """An answer that is being streamed."""

    asked: dict[str, Any]  # the user's message
    texts: list[str] = field(default_factory=list)  # of all its events, read or not
    result: Result | None = None
    ended: bool = False  # whether the last event was produced
    settled: bool = False  # whether the text that was read is in the conversation


class Chat:
    """A conversation with a model.

    system        the system message; None for none
    cache         a cache of one row to use; None creates one
    chat_options  further variables of the template (tools=, enable_thinking= …); `template="name"` picks one of
                  several; `allow_special=True` lets messages spell special tokens (see `Tokenizer.chat_ids`)
    settings      as for `generate`

    >>> chat = lamina.Chat(model, system="Be brief.")                 # doctest: +SKIP
    >>> chat.send("Why is the sky blue?").text[0]                     # doctest: +SKIP
    'Air scatters blue light more than red.'
    >>> chat                                                          # doctest: +SKIP
    Chat(Llama, 3 messages, 42 tokens in its cache)
    """

    def __init__(
        self,
        model: Model,
        system: Content | None = None,
        *,
        cache: Cache | None = None,
        chat_options: Mapping[str, Any] | None = None,
        **settings: Unpack[AllOptions],
    ) -> None:
        if model.tokenizer is None:
            raise InputError(
                "this checkpoint has no tokenizer, which a chat needs: set model.tokenizer, or use generate with ids"
            )
        if model.start_ids:
            raise InputError(f"{type(model).__name__} reads a source and cannot chat; give its prompts to generate")
        if cache is not None and not isinstance(cache, Cache):
            raise InputError(f"cache must be a cache of one row, as model.new_cache() makes, not {cache!r}")
        if cache is not None and cache.rows != 1:
            raise InputError(f"a chat has one row, and the cache has {cache.rows}: give cache.select([row])")
        if system is not None:
            check_content(system, "system")
        if chat_options is not None and not isinstance(chat_options, Mapping):
            raise InputError(f"chat_options must be a mapping of template variables, not {chat_options!r}")
        self.settings = settings_of(model, settings)
        if self.settings.num_return_sequences > 1:
            raise InputError(
                f"num_return_sequences={self.settings.num_return_sequences}: a chat continues one answer; leave it out"
            )
        if not self.settings.use_cache:
            raise InputError("use_cache=False: a chat continues its cache; leave it out")
        self.model, self.cache, self.chat_options = model, cache or model.new_cache(), dict(chat_options or {})
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.reused = 0
        """Tokens of the last prompt that the cache already held."""
        self._given = settings
        self._open: tuple[weakref.ref[Stream[Result]], _Answer] | None = None
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        messages = f"{len(self.messages)} message{'' if len(self.messages) == 1 else 's'}"
        return f"Chat({type(self.model).__name__}, {messages}, {len(self.cache.tokens[0])} tokens in its cache)"

    def send(self, text: Content) -> Result:
        """Generates the answer to a message. If that fails, the conversation is unchanged."""
        self._check_free()
        asked, prompt = self._prepare(text)
        result = self.model.generate(prompt, cache=self.cache, whole=True, **self._given)
        self._add_turn(asked, result, result.text[0])
        return result

    def stream(self, text: Content) -> Stream[Result]:
        """Streams the answer to a message. If the reader leaves early, the answer is the text read so far. If nothing
        was read, or generating fails, the conversation is unchanged."""
        self._check_free()
        asked, prompt = self._prepare(text)
        answer = _Answer(asked)

        def produce(emit: Emit) -> Result:
            def on_event(event: Event) -> None:
                answer.texts.append(event.text)
                answer.ended = event.reason is not None
                emit(event)

            answer.result = self.model.generate(prompt, cache=self.cache, whole=True, stream=on_event, **self._given)
            return answer.result

        stream = Stream(produce, settled=lambda read, left: self._settle(answer, read, left))
        self._open = weakref.ref(stream), answer
        return stream

    def _prepare(self, text: Content) -> tuple[dict[str, Any], list[list[int]]]:
        """-> the new message, and the ids of the whole conversation including it"""
        check_content(text, "text")
        asked = {"role": "user", "content": text}
        prompt = prompt_of(self.model, [*self.messages, asked], settings=self.settings, chat_options=self.chat_options)
        return asked, prompt.rows

    def _settle(self, answer: _Answer, read: int, left: bool) -> None:
        """Adds the text of the events that were read to the conversation. Called once a stream has ended, by the thread
        that ended it."""
        with self._changed:
            if read > 0 if left else answer.result is not None:
                self._add_turn(answer.asked, answer.result, "".join(answer.texts[:read]))
            answer.settled = True
            self._changed.notify_all()

    def _add_turn(self, asked: dict[str, Any], result: Result | None, text: str) -> None:
        if result is not None:
            self.reused, self.cache = result.reused[0], result.cache
        self.messages += [asked, {"role": "assistant", "content": text}]

    def _check_free(self) -> None:
        """Raises if an answer is still being read. Waits for one whose stream was dropped or read to its end."""
        if self._open is None:
            return
        stream, answer = self._open[0](), self._open[1]
        if stream is not None and not answer.settled and not (answer.ended and stream.read == len(answer.texts)):
            raise InputError("an answer is still being streamed: read it to its end, or cancel it")
        del stream
        with self._changed:
            self._changed.wait_for(lambda: answer.settled)
        self._open = None
