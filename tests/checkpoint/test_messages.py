"""Which messages are accepted, what is said of others, and how text parts reach a template."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.checkpoint import Tokenizer
from lamina.errors import InputError
from tests.generation.text import CHATML, reader, tokenizer

CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (5, r'message 1 of a chat must be like \{"role": "user", "content": "…"\}, not 5 \(int\)'),
        ({"content": "x"}, "message 1 of a chat must be like"),
        ({"role": 3, "content": "x"}, r'the role of message 1 must be a name like "user", not 3 \(int\)'),
        ({"role": "", "content": "x"}, "the role of message 1 must be a name"),
        ({"role": "user", "content": None}, "message 1, of role 'user', has no content: give it text"),
        ({"role": "user"}, "message 1, of role 'user', has no content"),
        ({"role": "assistant", "content": None}, "message 1, of role 'assistant', has no content"),
        ({"role": "user", "content": None, "tool_calls": CALLS}, "message 1, of role 'user', has no content"),
        ({"role": "user", "content": 5}, r"the content of message 1 must be text or a list of text parts, not 5 \(int"),
        ({"role": "user", "content": b"x"}, r"the content of message 1 must be text .*, not b'x' \(bytes\)"),
        ({"role": "user", "content": {"text": "x"}}, "the content of message 1 must be text"),
        ({"role": "user", "content": ["x"]}, "part 0 of the content of message 1 must be like"),
        ({"role": "user", "content": [{"type": "text"}]}, "part 0 of the content of message 1 must be like"),
        (
            {"role": "user", "content": [{"type": "image", "url": "x"}]},
            "part 0 of the content of message 1 is of type 'image', and this library reads only text",
        ),
        (
            {"role": "user", "content": "ab\ud800"},
            r"the content of message 1 is not text: it has a lone surrogate, '\\ud800', at character 2",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "\udc00"}]},
            "part 0 of the content of message 1 is not",
        ),
        ({"role": "tool", "content": "x", "name": "\ud800"}, "message 1 is not text: it has a lone surrogate"),
        ({"role": "assistant", "tool_calls": [{"f": {"\ud800": 1}}]}, "message 1 is not text"),
    ],
)
def test_bad_messages_are_refused_by_number(message: Any, problem: str) -> None:
    first = {"role": "user", "content": "hi"}
    with pytest.raises(InputError, match=f"^{problem}"):
        tokenizer().chat([first, message])
    with pytest.raises(InputError, match=f"^{problem}"):
        tokenizer().chat_ids([first, message])
    with pytest.raises(InputError, match=f"^prompt 1: {problem}"):
        reader().generate([[first], [first, message]], 1)


def test_messages_that_contain_themselves_are_refused() -> None:
    message: dict[str, Any] = {"role": "user", "content": "x"}
    message["more"] = [message]
    with pytest.raises(InputError, match="message 0 is nested too deeply, or contains itself"):
        tokenizer().chat([message])


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "x"}, 5, None])
def test_what_is_no_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(InputError, match="a chat must be a list of messages like"):
        tokenizer().chat(messages)


def test_the_assistant_may_call_tools_without_content() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}"
    calls = Tokenizer(tokenizer().backend, templates={"default": template})
    for message in (
        {"role": "assistant", "tool_calls": [1]},
        {"role": "assistant", "content": None, "tool_calls": [1]},
    ):
        assert calls.chat([message]).endswith("[1]")
    with pytest.raises(InputError, match="the chat template 'default' failed on these messages: TypeError"):
        tokenizer().chat([{"role": "assistant", "content": None, "tool_calls": [1]}])


def test_texts_that_are_not_text_are_refused_by_number() -> None:
    with pytest.raises(InputError, match=r"prompt 1 is not text: it has a lone surrogate, '\\ud800', at character 1"):
        reader().generate(["a", "b\ud800"], 1)
    with pytest.raises(InputError, match="the text is not text: it has a lone surrogate"):
        tokenizer().encode("\ud800")
    with pytest.raises(InputError, match=r"only text can be encoded, not 5 \(int\)"):
        tokenizer().encode(5)  # type: ignore[arg-type]


def test_bad_options_of_a_chat_are_refused() -> None:
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(InputError, match="must be a mapping of variables for the chat template"):
        reader().generate(chat, 1, chat_options=["tools"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="chat_options name 'messages', which the template gets from the chat"):
        reader().generate(chat, 1, chat_options={"messages": []})
    with pytest.raises(InputError, match="a variable of the chat template is not text"):
        reader().generate(chat, 1, chat_options={"tools": [{"name": "\ud800"}]})
    assert reader().generate(chat, 1, chat_options={"add_generation_prompt": False}).prompts[0] == (
        tokenizer().chat_ids(chat, add_generation_prompt=False)
    )


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for p in messages[0].content %}{% if p.type == 'text' %}({{ p.text }}){% endif %}{% endfor %}", "(a )(b)"),
        ("{{ messages[0].content }}", "a b"),
        ("{{ messages[0].content | tojson }}", '"a b"'),
        ("{{ '> ' + messages[0].content }}", "> a b"),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% else %}{{ '' }}{% endif %}", "a b"),
        ("{{ messages[0]['content'] | trim }}", "a b"),
        (CHATML, "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_text_parts_go_to_templates_that_know_them_and_are_joined_for_others(template: str, expected: str) -> None:
    one = Tokenizer(tokenizer().backend, templates={"default": template})
    assert one.chat(parts("a ", "b")) == expected
    assert one.chat_ids(parts("a ", "b")) == one.encode(expected, special=False)


def test_text_parts_equal_their_text() -> None:
    model = reader()
    whole = [{"role": "user", "content": "the thing"}]
    assert model.generate(parts("the ", "thing"), 5).tokens == model.generate(whole, 5).tokens
