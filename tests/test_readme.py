"""The README and docs/files.md are true: the file tree, the commands and the first example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import lamina
from docs.tree import page
from tests.families.harness import pair

README = Path(__file__).parent.parent / "README.md"


def test_the_file_tree_is_that_of_the_files() -> None:
    files = README.parent / "docs" / "files.md"
    assert files.read_text() == page(), "run `python docs/tree.py`"


def test_the_first_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r"## A first example\n```python\n(.*?)```", README.read_text(), re.S)
    assert example is not None
    model = pair("llama", "grouped")[1]
    monkeypatch.setattr(lamina, "load", lambda path: model)
    code = example[1].replace('"The sky is"', "[[1, 2, 3]]").replace(".text[0]", ".tokens[0]")
    exec(code, {"torch": torch})


def test_make_has_the_commands_it_names() -> None:
    targets = (README.parent / "Makefile").read_text()
    for name in re.findall(r"^make (\w+)", README.read_text(), re.M):
        assert f"\n{name}:" in targets
