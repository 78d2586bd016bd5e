from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import torch

from lamina.bench import BenchSettings, ModelShape
from lamina.bench.flops import prefill_bytes, prefill_flops
from lamina.bench.measure import DeviceRates
from lamina.bench.peers import Dynamic, peer_model
from lamina.bench.prefill import Prompts, Work, time_prefill
from lamina.bench.prefill_table import PREFILL_TABLE, TableLine, TableReport, run_table
from lamina.bench.random_model import random_model
from lamina.bench.subjects import Lamina
from lamina.checkpoint.shapes import SHAPES
from lamina.cli.bench import bench
from lamina.errors import InputError
from tests.bench.small import small

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.bench.runner.limits", lambda device, dtype: DeviceRates(1e10, "sum", 1e10, 1e10, 1e11))
    monkeypatch.setattr("lamina.bench.prefill.RUNS", 2)


@pytest.mark.parametrize("text", ["7", "3x5", "5x2-10", "64x100-1024"])
def test_prompts_are_read_from_text_and_told_by_it(text: str) -> None:
    prompts = Prompts.of(text)
    assert prompts.text == text and Prompts.of(prompts.text) == prompts


def test_ragged_prompts_are_spread_evenly_in_mixed_order() -> None:
    counts = Prompts.of("64x100-1024").counts
    assert (len(counts), min(counts), max(counts)) == (64, 100, 1024) and list(counts) != sorted(counts)
    assert max(b - a for a, b in zip(sorted(counts), sorted(counts)[1:], strict=False)) <= 15


@pytest.mark.parametrize("text", ["0", "x3", "2x", "9-3", "many", "-5", "3x0-4"])
def test_prompts_that_cannot_be_are_told(text: str) -> None:
    with pytest.raises(InputError, match="must be like 512, 64x512 or 64x100-1024"):
        Prompts.of(text)


def test_the_work_of_ragged_rows_is_the_sum_of_their_own_and_reads_weights_once() -> None:
    model = random_model(small("gemma-2-9b"), torch.float32, CPU)
    work = Work(model, Prompts.of("3x4-20", chunk=5))
    assert work.flops == sum(prefill_flops(model, count) for count in (4, 12, 20))
    two, one = prefill_bytes(model, (20, 20)), prefill_bytes(model, (20,))
    assert two - one == model.new_cache(1, capacity=20).nbytes  # of the tied embedding all is read either way


@pytest.mark.parametrize("chunk", [None, 4])
def test_subjects_read_the_real_tokens_of_ragged_rows_whole_and_in_chunks(chunk: int | None) -> None:
    config, prompts = small("llama-3.1-8b"), Prompts.of("3x2-9", chunk)
    ours, theirs = Lamina(random_model(config, torch.float32, CPU)), Dynamic(peer_model(config, torch.float32, CPU))
    passes: list[tuple[int, ...]] = []
    theirs.model.register_forward_pre_hook(
        lambda _, args, given: passes.append((given["input_ids"].shape[1], int(given["attention_mask"].sum()))),
        with_kwargs=True,
    )
    for subject in (ours, theirs):
        found = time_prefill(subject.name, subject.prefill, Work(ours.model, prompts), CPU)
        assert found.runs == 2 and found.host_seconds is None and found.tokens == 16
    masks = [(9, 16)] if chunk is None else [(4, 4), (4, 13), (1, 16)]
    assert passes == 3 * masks  # one run prepares, two are timed


def test_one_run_is_timed_after_the_first_however_long_it_takes() -> None:
    runs: list[int] = []
    model = random_model(small("llama-3.1-8b"), torch.float32, CPU)
    found = time_prefill("slow", lambda *_: runs.append(1), Work(model, Prompts.of("3")), CPU, until=0.0)
    assert runs == [1, 1] and found.runs == 1


def test_the_table_measures_shape_after_shape_and_reports_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"a": ModelShape("a", small("llama-3.1-8b")), "b": ModelShape("b", small("mamba-2.8b"))}
    monkeypatch.setattr("lamina.bench.prefill_table.find_shape", shapes.__getitem__)
    lines = [
        TableLine("a", Prompts.of("6"), (1e9, None)),
        TableLine("b", Prompts.of("2x3-5"), (0.0, None)),
    ]
    settings = BenchSettings(
        shapes["a"], CPU, torch.float32, (), (), (lines[0].prompts,), against="transformers", first_token=False
    )
    results = run_table(settings, lines)
    assert [(name, one.subject) for name, one in results.found] == [
        ("a", "lamina"), ("a", "transformers"), ("b", "lamina"), ("b", "transformers"),
    ]  # fmt: skip
    assert results.skipped == []
    report = TableReport(settings, results, lines, date(2026, 1, 2))
    (_, columns, table) = report.table()
    assert [line[columns.index("target")] for line in table] == ["≤ 1e+09 ms: reached", "", "≤ 0 ms: missed", ""]
    files = report.write(tmp_path)
    assert files[0].name.endswith("-prefill.json") and files[-1].suffix == ".png" and files[-1].stat().st_size > 1000
    data = json.loads(files[0].read_text())["prefill"]
    assert data[0]["shape"] == "a" and data[0]["of_compute"] == pytest.approx(
        data[0]["flops"] / data[0]["seconds"] / 1e11
    )
    assert report.command in files[1].read_text()
    report.show()
    late = run_table(BenchSettings(shapes["a"], CPU, torch.float32, (), (), settings.prefill, seconds=0.0), lines)
    assert late.found == [] and late.skipped == ["a: the 0 seconds were over", "b: the 0 seconds were over"]


def test_every_line_of_the_table_has_a_known_shape() -> None:
    assert {line.shape for line in PREFILL_TABLE} <= set(SHAPES)


def test_the_command_measures_prompts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(small("llama-3.1-8b")))
    shape = str(tmp_path / "mine.json")
    bench(shape=shape, prefill="8,16", ragged="3x2-9", chunk=6, device="cpu", against="transformers", out=tmp_path)
    out = capsys.readouterr().out
    assert "Prefill" in out and "of compute" in out and "Decode" not in out
    text = next(tmp_path.glob("*-mine-prefill.md")).read_text()
    assert "--prefill 8,16,3x2-9 --chunk 6" in text and "3 rows of 2 to 9 (16) in chunks of 6" in text
    assert text.count("| transformers |") == 3
    with pytest.raises(InputError, match="--shape is missing"):
        bench(prefill="8", device="cpu")
    with pytest.raises(InputError, match="has its own shapes and prompts"):
        bench(shape=shape, prefill="table", device="cpu")
