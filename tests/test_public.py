"""The public surface: what `lamina` exports, and which errors it raises."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import errors


def test_every_exported_name_can_be_imported_and_is_known_to_type_checkers() -> None:
    for name in lamina.__all__:
        assert getattr(lamina, name).__name__ == name
    source = ast.parse(Path(str(lamina.__file__)).read_text())
    typed = next(node for node in source.body if isinstance(node, ast.If))
    imported = {name.name for node in typed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert imported == set(lamina.__all__)


def test_every_error_of_the_library_is_exported_and_is_a_lamina_error() -> None:
    own = {
        name: one for name, one in vars(errors).items() if inspect.isclass(one) and one.__module__ == errors.__name__
    }
    assert set(own) <= set(lamina.__all__)
    assert all(issubclass(one, lamina.LaminaError) for one in own.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda: lamina.Sliding(0),
        lambda: lamina.Sliding(4, keep=-1),
        lambda: lamina.Chunked(0),
        lambda: lamina.load("no/such/checkpoint"),
        lambda: lamina.plan("no/such/checkpoint"),
        lambda: lamina.load_cache("no/such/file", None),  # type: ignore[arg-type]
        lambda: lamina.verify(None),  # type: ignore[arg-type]
    ],
)
def test_mistakes_of_the_caller_are_errors_of_the_library(call: Callable[[], Any]) -> None:
    with pytest.raises(lamina.LaminaError):
        call()
