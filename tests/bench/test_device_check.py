"""`bench.device_check` without a GPU: who shares a run, shards, the record that a second run goes on from, the page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from bench import device_check
from bench.captured_checks import LOGITS, PROMPTED, columns
from bench.device_models import WITH_STATES, config_of
from bench.kernel_signature import signature
from lamina.models import FAMILIES, TEXT_PARTS
from tests.families.cases import CASES


def of(family: str) -> Any:
    return signature(config_of(family))


def test_every_registered_family_is_run() -> None:
    found = device_check.runs([])
    assert {*FAMILIES, *TEXT_PARTS} == {*found} - {WITH_STATES, "own"}
    full = [family for family, (shared, _) in found.items() if shared is None]
    assert full == list(found)[: len(full)] and all(found[shared][0] is None for shared, _ in found.values() if shared)
    assert found["gemma3"][0] == "gemma3_text" and found["mistral3"][0] == found["mistral"][0]
    assert list(device_check.runs([], first=["mt5", "llama"]))[:3] == ["llama", "mt5", "deepseek_v3"]
    with pytest.raises(SystemExit, match="no family is called lama; known: afmoe, "):
        device_check.runs(["lama"])


def test_families_that_launch_the_same_kernels_share_a_run() -> None:
    assert of("llama") == of("qwen2") != of("gemma2")  # biases of products touch no cache
    assert of("mistral") != of("llama")  # another window
    assert len({of(family) for family in ("llama", "mamba", "mamba2", "deepseek_v3", "lfm2", "qwen3_next")}) == 6
    assert None not in {of(family) for family in ("llama", "mamba", "qwen3_next")}


def check(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> list[str]:
    """Runs it with checks that do nothing; -> the families that were run."""
    ran: list[str] = []

    def run(family: str, shared: str | None, only: list[str] | None) -> dict[str, Any]:
        ran.append(family)
        failed = ["laws, float32"] if family == "c" else []
        return {"family": family, "shares": shared, "cells": {"laws, float32": "ok"}, "failed": failed, "seconds": 1.0}

    plan = {"a": (None, 1), "b": (None, 2), "c": (None, 3), "d": ("a", 1), "e": ("b", 2)}
    monkeypatch.setattr(device_check, "run", run)
    monkeypatch.setattr(
        device_check, "runs", lambda families, first: {k: v for k, v in plan.items() if k in families or not families}
    )
    monkeypatch.setattr(sys, "argv", ["device_check", str(out), *words])
    with pytest.raises(SystemExit) as end:
        device_check.main()
    assert end.value.code == bool("c" in device_check.read(out.with_name(out.name + ".jsonl")))
    return ran


def test_shards_divide_the_families_and_a_second_run_skips_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.md"
    assert check(monkeypatch, out, "--shard", "1/2") == ["a", "c", "e"]
    assert check(monkeypatch, out, "--shard", "2/2") == ["b", "d"]
    assert check(monkeypatch, out) == []
    record = out.with_name("out.md.jsonl")
    record.write_text("\n".join(record.read_text().splitlines()[:-1]) + '\n{"family": "d", "cel')  # cut while writing
    assert check(monkeypatch, out) == ["d"]
    text = out.read_text()
    assert check(monkeypatch, out, "--seconds", "0") == []
    assert "| d | as a | as a | ok | as a |" in text and "- FAILED: c, laws, float32" in text
    assert check(monkeypatch, out, "--again", "--families", "b") == ["b"]


def test_a_family_that_the_installed_transformers_lacks_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_check.stand_in_for_missing_configs() == []
    missing = device_check.MissingConfig("NextConfig")
    monkeypatch.setitem(CASES, "next", {"first": lambda: missing(hidden_size=8)})
    line = device_check.run("next", None)
    assert line["skipped"] == "transformers has no NextConfig" and line["failed"] == []
    lines = {"next": line}
    assert "- next was skipped: transformers has no NextConfig" in device_check.page(lines, "A machine.")
    assert hasattr(transformers, "LlamaConfig")


def test_an_error_in_a_check_is_written_down_and_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "broken", {"first": lambda: 1 // 0})
    assert device_check.run("broken", None)["failed"] == ["ZeroDivisionError: integer division or modulo by zero"]


def test_a_check_that_raises_has_failed_and_the_next_is_tried() -> None:
    line: dict[str, Any] = {"family": "a", "took": {}, "cells": {}, "failed": []}
    device_check.try_one(line, "laws", lambda one: 1 // 0, None)  # type: ignore[arg-type, return-value]
    device_check.try_one(line, "greedy", lambda one: (True, "yes"), None)  # type: ignore[arg-type]
    assert line["failed"] == ["laws: ZeroDivisionError: integer division or modulo by zero"]
    assert line["cells"]["greedy"] == "yes"


def test_only_some_checks_are_run_and_the_page_has_their_columns() -> None:
    assert device_check.titles(["prompts", "logits"]) == [LOGITS, PROMPTED]
    assert device_check.titles(None) == list(columns())
    line = {"family": "a", "shares": None, "cells": {PROMPTED: "yes"}, "failed": [], "seconds": 1.0}
    text = device_check.page({"a": line}, "A machine.", ["prompts"])
    assert f"| family | {PROMPTED} | seconds |" in text and "| a | yes | 1 |" in text and "--only prompts" in text
    with pytest.raises(SystemExit, match="no check has weather in its title: logits"):
        device_check.titles(["weather"])


WORKER = """
import json, sys
for text in sys.stdin:
    family, shared = json.loads(text)
    if family == "dies":
        sys.exit(3)
    with open(sys.argv[1] + ".jsonl", "a") as record:
        print(json.dumps({"family": family, "shares": shared, "cells": {}, "failed": []}), file=record)
    print("this family is done" + (", and this process ends" if family == "last" else ""), flush=True)
    if family == "last":
        sys.exit(0)
"""


def test_processes_take_families_as_they_are_free_and_one_that_ends_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_check, "COMMAND", [sys.executable, "-c", WORKER])
    record = tmp_path / "out.md.jsonl"
    families = ["a", "dies", "last", "b", "c", "d"]
    device_check.side_by_side([(family, None) for family in families], record, 2, until=float("inf"))
    lines = device_check.read(record)
    assert sorted(lines) == sorted(families)
    failed = {family: line["failed"] for family, line in lines.items() if line["failed"]}
    assert failed == {"dies": ["the process ended with exit code 3"]}
    device_check.side_by_side([("e", None)], record, 2, until=0.0)
    assert "e" not in device_check.read(record)
