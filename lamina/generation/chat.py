"""`Chat`: a conversation whose cache stays from turn to turn.

    chat = Chat(model, system="Answer in one sentence.", max_new_tokens=200)
    print(chat.send("Why is the sky blue?").text[0])
    for event in chat.stream("And at dusk?"):
        print(event.text, end="")

Every turn renders the whole conversation by the checkpoint's template and feeds what the cache does not hold: usually
just the new message. Where a template changes what was said before, the cache is taken back to there.

The conversation holds what its reader got. If the reader leaves a stream early, the answer is the text of the events
that were read; the producer may have been ahead of the reader, and the next turn takes the cache back to that text.
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

    asked: dict[str, Any]
    said: list[str] = field(default_factory=list)  # the texts of its events, also of those that were not read
    result: Result | None = None
    ended: bool = False  # whether the last event was made
    settled: bool = False  # whether the conversation holds what was read


class Chat:
    """A conversation with a model.

    system        the first message, where there is to be one
    cache         a cache of one row to use; made when None
    chat_options  what else the template is given (tools=, enable_thinking= …); `template="name"` picks one of several;
                  `allow_special=True` lets messages spell special tokens (see `Tokenizer.chat_ids`)
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
            raise InputError("this checkpoint has no tokenizer, so there is nothing to chat with")
        if model.start_ids:
            raise InputError(f"{type(model).__name__} reads a source and cannot chat; give its prompts to generate")
        if cache is not None and cache.rows != 1:
            raise InputError(f"a chat has one row, and the cache has {cache.rows}: give cache.select([row])")
        if system is not None:
            check_content(system, "system")
        if chat_options is not None and not isinstance(chat_options, Mapping):
            raise InputError(f"chat_options must be a mapping of template variables, not {chat_options!r}")
        self.settings = settings_of(model, settings)
        if self.settings.num_return_sequences > 1:
            raise InputError(
                f"num_return_sequences={self.settings.num_return_sequences}: a chat goes on from one answer"
            )
        if not self.settings.use_cache:
            raise InputError("use_cache=False: a chat goes on from its cache; leave it out")
        self.model, self.cache, self.chat_options = model, cache or model.new_cache(), dict(chat_options or {})
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.reused = 0
        """How many tokens of the last prompt the cache already held."""
        self._given = settings
        self._open: tuple[weakref.ref[Stream[Result]], _Answer] | None = None
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        messages = f"{len(self.messages)} message{'' if len(self.messages) == 1 else 's'}"
        return f"Chat({type(self.model).__name__}, {messages}, {len(self.cache.tokens[0])} tokens in its cache)"

    def send(self, text: Content) -> Result:
        """The model's answer. If it fails, the conversation is as it was."""
        self._check_free()
        asked, prompt = self._prepare(text)
        result = self.model.generate(prompt, cache=self.cache, whole=True, **self._given)
        self._say(asked, result, result.text[0])
        return result

    def stream(self, text: Content) -> Stream[Result]:
        """The same, as it is made. If the reader leaves early, what it has read is the answer; if it has read nothing,
        or generating fails, the conversation is as it was."""
        self._check_free()
        asked, prompt = self._prepare(text)
        answer = _Answer(asked)

        def produce(emit: Emit) -> Result:
            def tell(event: Event) -> None:
                answer.said.append(event.text)
                answer.ended = event.reason is not None
                emit(event)

            answer.result = self.model.generate(prompt, cache=self.cache, whole=True, stream=tell, **self._given)
            return answer.result

        stream = Stream(produce, settled=lambda read, left: self._settle(answer, read, left))
        self._open = weakref.ref(stream), answer
        return stream

    def _prepare(self, text: Content) -> tuple[dict[str, Any], list[list[int]]]:
        """The new message, and the whole conversation with it as ids."""
        check_content(text, "text")
        asked = {"role": "user", "content": text}
        prompt = prompt_of(self.model, [*self.messages, asked], settings=self.settings, chat_options=self.chat_options)
        return asked, prompt.rows

    def _settle(self, answer: _Answer, read: int, left: bool) -> None:
        """Called when a stream is over, by whichever thread ended it: keeps the text of the events that were read."""
        with self._changed:
            if read > 0 if left else answer.result is not None:
                self._say(answer.asked, answer.result, "".join(answer.said[:read]))
            answer.settled = True
            self._changed.notify_all()

    def _say(self, asked: dict[str, Any], result: Result | None, text: str) -> None:
        if result is not None:
            self.reused, self.cache = result.reused[0], result.cache
        self.messages += [asked, {"role": "assistant", "content": text}]

    def _check_free(self) -> None:
        """Refuses while someone still reads an answer; waits for the end of one whose stream was dropped or read."""
        if self._open is None:
            return
        stream, answer = self._open[0](), self._open[1]
        if stream is not None and not answer.settled and not (answer.ended and stream.read == len(answer.said)):
            raise InputError("an answer is still being streamed: read it to its end, or cancel it")
        del stream
        with self._changed:
            self._changed.wait_for(lambda: answer.settled)
        self._open = None
