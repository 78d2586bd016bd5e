"""`Chat`: a conversation whose cache stays from turn to turn.

    chat = Chat(model, system="Answer in one sentence.", max_new_tokens=200)
    print(chat.send("Why is the sky blue?").text[0])
    for event in chat.stream("And at dusk?"):
        print(event.text, end="")

Every turn renders the whole conversation by the checkpoint's template and feeds what the cache does not hold: usually
just the new message. Where a template changes what was said before, the cache is taken back to there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from lamina.cache.cache import Cache
from lamina.errors import InputError
from lamina.generation.options import AllOptions
from lamina.generation.prompt import prompt_of
from lamina.generation.result import Result
from lamina.generation.settings import settings_of
from lamina.generation.stream import Cancelled, Emit, Stream

if TYPE_CHECKING:
    from lamina.model import Model


class Chat:
    """A conversation with a model.

    system        the first message, where there is to be one
    cache         a cache of one row to use; made when None
    chat_options  what else the template is given (tools=, enable_thinking= …)
    settings      as for `generate`
    """

    def __init__(
        self,
        model: Model,
        system: str | None = None,
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
        self._open: Stream[Result] | None = None

    def send(self, text: str) -> Result:
        """The model's answer. If it fails, the conversation is as it was."""
        self._check_free()
        asked, prompt = self._prepare(text)
        result = self.model.generate(prompt, cache=self.cache, whole=True, **self._given)
        self._say(asked, result)
        return result

    def stream(self, text: str) -> Stream[Result]:
        """The same, as it is made. Cancelled, what was said so far is the answer."""
        self._check_free()
        self._open = Stream(lambda emit: self._produce(text, emit))
        return self._open

    def _produce(self, text: str, emit: Emit) -> Result:
        asked, prompt = self._prepare(text)
        said: list[str] = []
        events = self.model.stream(prompt, cache=self.cache, whole=True, **self._given)
        try:
            for event in events:
                said.append(event.text)
                emit(event)
        except Cancelled:
            self._say(asked, "".join(said))
            raise
        self._say(asked, events.result)
        return events.result

    def _prepare(self, text: str) -> tuple[dict[str, Any], list[list[int]]]:
        """The new message, and the whole conversation with it as ids."""
        asked = {"role": "user", "content": text}
        prompt = prompt_of(self.model, [*self.messages, asked], settings=self.settings, chat_options=self.chat_options)
        return asked, prompt.rows

    def _say(self, asked: dict[str, Any], answer: Result | str) -> None:
        if isinstance(answer, Result):
            self.reused, self.cache, answer = answer.reused[0], answer.cache, answer.text[0]
        self.messages += [asked, {"role": "assistant", "content": answer}]

    def _check_free(self) -> None:
        if self._open is not None and not self._open.over:
            raise InputError("an answer is still being streamed: read it to its end, or cancel it")
