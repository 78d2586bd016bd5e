"""The keyword arguments that editors show are the settings, by name and type; what mypy makes of them is in
tests/typing."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

import lamina
from docs.setting_types import FILES
from lamina.cache.cache import Cache
from lamina.generation import Chat, PrefixStore, Settings, generate, stream
from lamina.generation import entry as loop
from lamina.generation.settings.options import CALL, AllOptions, CallOptions, Options
from lamina.generation.settings.typed import SettingFields
from lamina.model import Model

ROOT = Path(__file__).parent.parent.parent
KINDS = {"Model": Model, "Cache": Cache, "PrefixStore": PrefixStore}
SETTINGS = get_type_hints(Settings, localns=KINDS)
OPTIONS = get_type_hints(AllOptions, localns=KINDS)
NAMES = [field.name for field in dataclasses.fields(SettingFields)]
UNTYPED = {"negative_prompt", "watermarking_config"}  # in any form of prompt; a mapping, or an object of transformers


def members(kind: Any) -> set[Any]:
    return set(get_args(kind)) if get_origin(kind) in (Union, UnionType) else {kind}


def test_every_setting_is_an_option_and_nothing_else_is() -> None:
    assert set(OPTIONS) == set(NAMES)
    assert set(Options.__annotations__) == set(NAMES) - {"max_new_tokens"}


@pytest.mark.parametrize("name", NAMES)
def test_an_option_has_the_type_of_its_setting_and_none_turns_it_off(name: str) -> None:
    kept, given = members(SETTINGS[name]), members(OPTIONS[name])
    if name in UNTYPED:
        assert given == {Any}
        return
    assert NoneType in given and Any not in given
    simple = {int, float, bool, str}
    assert kept & simple <= given  # the other kinds are compared by mypy, in tests/typing/options.py
    if kept <= simple | {NoneType}:
        assert given == kept | {NoneType}


@pytest.mark.parametrize("file", FILES)
def test_the_types_of_settings_are_those_of_their_declarations(file: str) -> None:
    assert (ROOT / file).read_text() == FILES[file](), "run `python docs/setting_types.py`"


def test_what_belongs_to_one_call_is_what_generate_takes_besides() -> None:
    own = inspect.signature(loop._prepare).parameters
    assert set(CALL) == set(CallOptions.__annotations__) - set(Options.__annotations__)
    assert {"model", "prompts", "max_new_tokens", *CALL, "options"} == set(own)
    for name in CALL:
        assert name in (generate.__doc__ or "") or name.startswith(("decoder_", "inputs_", "chat_")), name


@pytest.mark.parametrize("call", [generate, stream, Model.generate, Model.stream, Chat.__init__])
def test_options_are_typed_wherever_they_are_taken(call: Any) -> None:
    (options,) = (one for one in inspect.signature(call).parameters.values() if one.kind is one.VAR_KEYWORD)
    assert re.fullmatch(r"Unpack\[(Call|All)Options\]", options.annotation)


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(lamina.__file__).parent / "py.typed").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = project["tool"]["setuptools"]["package-data"]["lamina"]
    assert shipped == ["py.typed", "exporting/cpp/*", "native/src/*", "native/shipped/*.so"]
    assert "tests.typing" in project["tool"]["mypy"]["packages"] and project["tool"]["mypy"]["warn_unused_ignores"]
