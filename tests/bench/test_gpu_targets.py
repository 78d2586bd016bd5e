"""`bench.gpu_targets`: its commands exist, each part fits its time, and a failing command does not stop the others."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from bench import gpu_targets
from bench.gpu_targets import PARTS, Command


def test_every_command_is_a_module_that_can_be_run_and_a_part_ends_within_nine_minutes() -> None:
    for commands in PARTS.values():
        assert sum(command.seconds for command in commands) <= 540
        for command in commands:
            flag, module, *_ = command.words.split()
            assert flag == "-m" and importlib.util.find_spec(module) is not None, command.words


def test_what_fails_or_takes_too_long_is_named_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nprint('asked for', sys.argv[1])\ntime.sleep(float(sys.argv[1]))\n")
    commands = [
        Command("-c 'raise SystemExit(3)'", 60, "a failure"),
        Command(f"{script} 600", 3, "too long"),
        Command(f"{script} 0", 60, "a line"),
    ]
    monkeypatch.setitem(PARTS, "packed", commands)
    monkeypatch.setattr(sys, "argv", ["gpu_targets", "packed", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        gpu_targets.main()
    assert str(end.value).startswith("not done: 00-") and str(end.value).count(".log") == 2
    shown = capfd.readouterr().out
    assert "exit code 3" in shown and "stopped after 3 s" in shown and "asked for 0" in shown
    last = sorted((tmp_path / "out").iterdir())[-1]
    assert last.read_text() == "asked for 0\n"


def test_an_unknown_part_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_targets", "all"])
    with pytest.raises(SystemExit, match="the parts are packed, prompts, families"):
        gpu_targets.main()
