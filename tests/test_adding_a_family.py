"""docs/adding-a-family.md is true: the family that it shows is the real one, and its program runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import lamina
from lamina.models.mistral import Mistral

PAGE = (Path(__file__).parent.parent / "docs" / "adding-a-family.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_family_that_it_shows_is_the_real_one() -> None:
    assert inspect.getsource(Mistral) == BLOCKS[0], "copy the class into the page"


def test_its_program_registers_loads_inspects_and_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(BLOCKS[1], "adding-a-family.md", "exec"), {"__name__": "shown"})
    finally:
        lamina.unregister_family("my_mistral")
    said = capsys.readouterr().out
    assert "MyMistral (shown), model_type my_mistral" in said and said.endswith("True torch.Size([1, 3, 67])\n")
    assert "not read by this family: rms_norm_eps\n" in said  # the field that it replaces


def test_the_calls_of_a_configuration_that_it_lists_exist() -> None:
    for name in re.findall(r"`c\.(\w+)\(", PAGE):
        assert callable(getattr(lamina.config.Config({}), name))
