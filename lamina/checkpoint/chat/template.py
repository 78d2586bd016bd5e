"""Chat templates: the Jinja text a checkpoint carries, rendered as a prompt inside a sandbox with limits."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.folder import read_json
from lamina.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from lamina.checkpoint.chat.literal import Literal

DEFAULT = "default"


def choose(templates: Mapping[str, str], name: str | None, variables: Mapping[str, Any]) -> str:
    """The name of the template to use: the one named, else tool_use where tools are given, else the default."""
    if not templates:
        raise CheckpointError("the checkpoint has no chat template; write the prompt as plain text")
    if name is None:
        name = "tool_use" if variables.get("tools") and "tool_use" in templates else DEFAULT
    if name not in templates:
        raise InputError(f"there is no chat template {name!r}; there are: {', '.join(sorted(templates))}")
    return name


def render(name: str, source: str, variables: Mapping[str, Any], literal: Literal | None = None) -> str:
    """Renders the template of this name, within the limits of `checkpoint/chat/sandbox.py`.

    literal  has marked the variables, where they spell special tokens
    """
    from jinja2 import Template, TemplateError

    from lamina.checkpoint.chat.sandbox import LimitError, Sandbox

    sandbox = Sandbox(literal)
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form[:1000])
    try:
        return Template.from_code(sandbox, compiled(source), sandbox.make_globals(None)).render(variables)
    except LimitError as error:
        raise InputError(f"the chat template {name!r} {error}: use another one, or give the prompt as text") from error
    except TemplateError as error:
        cause: Exception = error
        why = f"refused these messages: {error}"
    except Exception as error:  # of the template's own operations: None + text, 1 / 0, endless recursion …
        cause, why = error, f"failed on these messages: {type(error).__name__}: {error}"
    raise InputError(f"the chat template {name!r} {why if literal is None else literal.unmark(why)}") from cause


@lru_cache(maxsize=64)
def compiled(source: str) -> CodeType:
    """The code of a template. It runs in any sandbox."""
    from lamina.checkpoint.chat.sandbox import Sandbox  # jinja2 is slow to import
    from lamina.checkpoint.chat.template_syntax import Limited

    sandbox = Sandbox()
    tree = Limited().visit(sandbox.parse(source))
    tree.set_environment(sandbox)
    return sandbox.compile(tree)


def refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def folder_templates(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder by name, from every place that has some; a later place wins:

    processor_config.json, tokenizer_config.json, chat_template.json  the entry chat_template
    chat_template.jinja                                               the default template
    additional_chat_templates/NAME.jinja                              named ones
    """
    templates: dict[str, str] = {}
    for name in ("processor_config.json", "tokenizer_config.json", "chat_template.json"):
        if name == "tokenizer_config.json":
            found = tokenizer_config
        else:
            found = read_json(path / name) if (path / name).is_file() else {}
        templates |= named_templates(found.get("chat_template"), path / name)
    if (file := path / "chat_template.jinja").is_file():
        templates[DEFAULT] = file.read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def named_templates(entry: Any, file: Path) -> dict[str, str]:
    """The templates of an entry: a text, a list of {"name": …, "template": …}, or an object of texts by name.

    >>> named_templates([{"name": "rag", "template": "…"}], Path("tokenizer_config.json"))
    {'rag': '…'}
    """
    if isinstance(entry, str):
        entry = {DEFAULT: entry}
    elif isinstance(entry, list) and all(isinstance(item, dict) for item in entry):
        entry = {item.get("name"): item.get("template") for item in entry}
    if entry is None:
        return {}
    if not isinstance(entry, dict) or not all(isinstance(text, str) for pair in entry.items() for text in pair):
        raise CheckpointError(f"chat_template in {file} is neither a text nor a list of named texts")
    return entry


def gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a GGUF file: tokenizer.chat_template, and tokenizer.chat_template.NAME."""
    key = "tokenizer.chat_template"
    named = {k.removeprefix(key + "."): v for k, v in metadata.items() if k.startswith(key + ".")}
    found = named | ({DEFAULT: metadata[key]} if key in metadata else {})
    if odd := [name for name, text in found.items() if not isinstance(text, str)]:
        raise CheckpointError(f"the chat template {odd[0]!r} of the GGUF file ({key}) is no text")
    return found
