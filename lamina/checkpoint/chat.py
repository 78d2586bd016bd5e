"""Chat templates: the Jinja text a checkpoint carries, turned into a prompt inside Jinja's sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.folder import read_json
from lamina.checkpoint.source import CheckpointError
from lamina.errors import InputError

if TYPE_CHECKING:
    from jinja2.ext import Extension
    from jinja2.parser import Parser

DEFAULT = "default"


def render(
    templates: Mapping[str, str],
    name: str | None,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """Render one of `templates`: the one named, else tool_use where tools are given, else the default."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if not templates:
        raise CheckpointError("the checkpoint has no chat template; write the prompt as plain text")
    if name is None:
        name = "tool_use" if variables.get("tools") and "tool_use" in templates else DEFAULT
    if name not in templates:
        raise InputError(f"there is no chat template {name!r}; there are: {', '.join(sorted(templates))}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation_block(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(templates[name]).render(messages=messages, **variables)
    except TemplateError as error:
        raise InputError(f"the chat template {name!r} refused these messages: {error}") from error


def refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def generation_block() -> type[Extension]:
    """{% generation %} marks what the assistant said, for training; here its body is just rendered."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    return Generation


def folder_templates(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder by name; files win over the entry in tokenizer_config.json."""
    templates: dict[str, str] = {}
    entries = [tokenizer_config.get("chat_template")]
    if (file := path / "chat_template.json").is_file():
        entries.append(read_json(file).get("chat_template"))
    for entry in entries:
        if isinstance(entry, str):
            templates[DEFAULT] = entry
        elif isinstance(entry, list):
            templates |= {item["name"]: item["template"] for item in entry}
    if (file := path / "chat_template.jinja").is_file():
        templates[DEFAULT] = file.read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a GGUF file: tokenizer.chat_template, and tokenizer.chat_template.NAME."""
    key = "tokenizer.chat_template"
    named = {k.removeprefix(key + "."): v for k, v in metadata.items() if k.startswith(key + ".")}
    return named | ({DEFAULT: metadata[key]} if key in metadata else {})
