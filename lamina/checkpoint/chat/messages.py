"""Messages of a chat: which are accepted, and how text parts become text.

A message is like {"role": "user", "content": "…"}. Its content is text or a list of text parts, [{"type": "text",
"text": "…"}]. A message of the assistant that has something else to say (tool_calls …) may have no content, or None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lamina.errors import InputError

LIKE = '{"role": "user", "content": "…"}'


def check_messages(messages: Any) -> None:
    """Refuses what is no conversation, naming the message.

    >>> check_messages([{"role": "user", "content": 5}])
    Traceback (most recent call last):
    lamina.errors.InputError: the content of message 0 must be text or a list of text parts, not 5 (int)
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"a chat must be a list of messages like {LIKE}, not {short(messages)}")
    for m, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InputError(f"message {m} of a chat must be like {LIKE}, not {short(message)}")
        role = message["role"]
        if not isinstance(role, str) or not role:
            raise InputError(f'the role of message {m} must be a name like "user", not {short(role)}')
        if message.get("content") is not None:
            check_content(message["content"], f"the content of message {m}")
        elif not _may_be_silent(message):
            raise InputError(
                f"message {m}, of role {role!r}, has no content: give it text "
                "(only a message of the assistant with tool_calls needs none)"
            )
        try:
            for text in strings(message):
                check_text(text, f"message {m}")
        except RecursionError:
            raise InputError(f"message {m} is nested too deeply, or contains itself") from None


def check_content(content: Any, what: str) -> None:
    """Refuses what cannot be the content of a message, which `what` names."""
    if isinstance(content, str):
        return check_text(content, what)
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise InputError(f"{what} must be text or a list of text parts, not {short(content)}")
    for p, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            raise InputError(f"part {p} of {what} is of type {kind!r}, and this library reads only text")
        if kind is None or not isinstance(part.get("text"), str):
            raise InputError(f'part {p} of {what} must be like {{"type": "text", "text": "…"}}, not {short(part)}')
        check_text(part["text"], f"part {p} of {what}")


def check_text(text: str, what: str) -> None:
    """Refuses half a character: a surrogate without its other half has no UTF-8 and no token.

    >>> check_text("a\\ud83d", "prompt 0")
    Traceback (most recent call last):
    lamina.errors.InputError: prompt 0 is not text: it has a lone surrogate, '\\ud83d', at character 1
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is not text: it has a lone surrogate, {text[error.start]!a}, at character {error.start}"
        ) from None


def has_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the content of any message is a list of text parts."""
    return any(is_parts(message.get("content")) for message in messages)


def is_parts(content: Any) -> bool:
    return isinstance(content, Sequence) and not isinstance(content, str)


def text_of(content: Sequence[Mapping[str, Any]]) -> str:
    """The text of a list of parts.

    >>> text_of([{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}])
    'Hello there'
    """
    return "".join(part["text"] for part in content)


def with_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with text in place of text parts."""
    return [
        {**message, "content": text_of(message["content"])} if is_parts(message.get("content")) else message
        for message in messages
    ]


def shown_as_text(messages: Sequence[Mapping[str, Any]], prompt: str) -> bool:
    """Whether a prompt shows the text parts of all messages as text: each text is there, and no part is printed as the
    mapping that it is."""
    parts = [part for message in messages if is_parts(message.get("content")) for part in message["content"]]
    return all(
        part["text"].strip() in prompt
        and str(dict(part)) not in prompt
        and json.dumps(dict(part), ensure_ascii=False) not in prompt
        for part in parts
    )


def strings(value: Any) -> Iterator[str]:
    """Every text inside a value: of mappings (their keys too), lists and tuples.

    >>> list(strings({"role": "user", "content": [{"text": "hi"}]}))
    ['role', 'user', 'content', 'text', 'hi']
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from strings(key)
            yield from strings(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from strings(inside)


def short(value: Any) -> str:
    """A value and its type in a few words."""
    text = ascii(value) if isinstance(value, str) else repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}…"
    return "None" if value is None else f"{text} ({type(value).__name__})"


def _may_be_silent(message: Mapping[str, Any]) -> bool:
    """Whether a message without content says something in another field. Explicit None is for the assistant only."""
    others = any(value for key, value in message.items() if key not in ("role", "name", "content"))
    return others and (message["role"] == "assistant" or "content" not in message)
