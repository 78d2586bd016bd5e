from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path

import pytest
import torch

from bench.activation_quality import by_steps, divergence, plain_pass, rounded, with_rounded_inputs
from lamina.bench import ModelShape, random_model
from lamina.bench.cpu import llama_cpp as peer
from lamina.bench.cpu.native_read import fewest_seconds
from lamina.bench.cpu.report import CpuReport, CpuTarget
from lamina.bench.cpu.table import (
    FLOAT32,
    LLAMA_CPP,
    MAMBA2_130M,
    OURS,
    PACKED,
    QWEN3_0_6B,
    TRANSFORMERS,
    CpuDecoded,
    CpuPrefilled,
    CpuResults,
    CpuSettings,
    _Run,
    decode_by_turns,
)
from lamina.cli.bench import bench
from lamina.config import Config
from lamina.errors import InputError
from lamina.models import family
from tests.bench.small import small

CHILD = """
import json, sys
print(json.dumps({"version": "1.2"}), flush=True)
for line in sys.stdin:
    what, count = json.loads(line)
    if what == "open" and count == 13:
        sys.exit("no room")
    print(json.dumps(count / 10), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(peer, "CHILD", tmp_path / "child.py")


def results() -> CpuResults:
    """At 1 GB/s, 100 MB a step: the limit is 10 tokens/s."""
    found = CpuResults(threads=2, read=1e9, file_bytes=100, packed_bytes=120, loads=[0.5, 1.0])
    found.decoded = [
        CpuDecoded("m", FLOAT32, 64, 1e8, {OURS: [0.2, 0.125], TRANSFORMERS: [0.25, 0.5]}),
        CpuDecoded("m", PACKED, 64, 1e8, {OURS: [0.2], LLAMA_CPP: [0.3]}),
        CpuDecoded("m", PACKED, 2000, 1e8, {OURS: [0.2]}),
        CpuDecoded("other", "int8", 64, 1e8, {OURS: [0.2]}),
    ]
    found.prefilled = CpuPrefilled(512, {"lamina, float32": [1.0], "lamina, packed": [3.0, 2.0]})
    found.absent = {LLAMA_CPP: "because"}
    return found


def test_the_fastest_turn_counts_and_targets_are_told(tmp_path: Path) -> None:
    report = CpuReport(CpuSettings(llama_cpp="python"), results(), date(2026, 1, 2))
    lines = report.decode_lines()
    assert lines[0][3:9] == ("8", "100 MB", "10", "80%", "4", "2.00 ×")
    assert [line[-1] for line in lines] == [
        "≥ 66% of the limit: reached, ≥ 2.4 × transformers: missed",
        "≥ 1.05 × llama.cpp: reached",
        "≥ 1.5 × llama.cpp: not measured",
        "≥ 60% of the limit: missed",
    ]
    assert report.prefill_lines()[1][-1] == "no slower than float32: missed"
    assert report.weight_lines()[0][-1] == "≤ 1.1 ×: missed"
    assert "No llama.cpp column: because." in report.markdown()
    files = report.write(tmp_path)
    assert [file.suffix for file in files] == [".json", ".md"] and all("2026-01-02" in file.name for file in files)
    data = json.loads(files[0].read_text())
    assert data["decoded"][0]["share"] == pytest.approx(0.8) and data["loads"] == [0.5, 1.0]


def test_a_target_without_parts_says_nothing() -> None:
    assert CpuTarget().told(results().decoded[0], 1e9) == ""


def test_subjects_take_turns() -> None:
    order: list[str] = []

    class Subject:
        def __init__(self, name: str) -> None:
            self.name = name

        def decode(self, steps: int) -> float:
            order.append(self.name)
            return 0.05 * steps

    times, steps = decode_by_turns({OURS: Subject("a"), "other": Subject("b")}, 2)
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b"] and steps == 4
    assert times == {OURS: pytest.approx([0.05, 0.05]), "other": pytest.approx([0.05, 0.05])}


def test_models_are_decoded_and_read_prompts_beside_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from lamina.bench.peers import Dynamic, peer_model

    monkeypatch.setattr("lamina.bench.cpu.table.cpu_read_bandwidth", lambda threads: 1e9)
    config = small("llama-3.1-8b")
    ours, cpu = random_model(config, torch.float32, "cpu"), torch.device("cpu")
    theirs = Dynamic(peer_model(config, torch.float32, cpu))
    run = _Run(CpuSettings(contexts=(5,), prompt=7, rounds=2), lambda *_: None)
    run._prefill(ours, ours, theirs, None)
    run._decode("tiny", FLOAT32, 5, ours, {TRANSFORMERS: theirs})
    (one,) = run.results.decoded
    assert {name: len(times) for name, times in one.times.items()} == {OURS: 2, TRANSFORMERS: 2}
    assert one.moved > sum(weight.nbytes for weight in ours.parameters()) * 0.5 and run.results.read == 1e9
    assert run.results.prefilled is not None and len(run.results.prefilled.times) == 3
    late = _Run(CpuSettings(seconds=-1.0), lambda *_: None)
    late._decode("tiny", FLOAT32, 5, ours, {})
    assert late.results.decoded == [] and late.results.skipped == ["tiny, float32: context 5: the -1 seconds were over"]


def test_llama_cpp_answers_line_by_line_from_its_process(child: None) -> None:
    with peer.LlamaCpp(sys.executable, Path("x.gguf"), 2, 100) as theirs:
        theirs.open(4)
        assert theirs.version == "1.2" and theirs.decode(5) == 0.5 and theirs.prefill(20) == 2.0
        with pytest.raises(peer.LlamaCppError, match="no room"):
            theirs.open(13)


def test_the_table_says_why_llama_cpp_is_missing() -> None:
    for python, why in (
        (None, "--llama-cpp names no environment"),
        ("/nowhere/python", "/nowhere/python cannot be run: No such file"),
        (sys.executable, "No module named 'llama_cpp'"),
    ):
        run = _Run(CpuSettings(llama_cpp=python), lambda *_: None)
        assert run._llama_cpp(Path("x.gguf")) is None and why in run.results.absent[LLAMA_CPP]


@pytest.mark.parametrize(("shape", "size"), [(MAMBA2_130M, 0.1288e9), (QWEN3_0_6B, 0.596e9)])
def test_shapes_have_the_size_of_the_models_they_are_named_after(shape: ModelShape, size: float) -> None:
    with torch.device("meta"):
        model = family(shape.config["model_type"]).build(Config(dict(shape.config)))
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(size, rel=3e-3)


def test_the_command_refuses_options_that_the_table_sets_itself() -> None:
    with pytest.raises(InputError, match="--cpu has its own models"):
        bench(cpu=True, shape="smollm2-135m")
    with pytest.raises(InputError, match="add --cpu"):
        bench(llama_cpp="python")


def test_every_thread_does_its_part_of_every_repeat() -> None:
    done: list[tuple[int, int]] = []
    assert fewest_seconds(lambda repeat, thread: done.append((repeat, thread)), 2, 3) >= 0
    assert sorted(done) == [(repeat, thread) for repeat in range(3) for thread in range(2)]


def test_steps_are_no_distance_from_a_plain_pass_and_rounded_inputs_are_nearer_in_smaller_groups() -> None:
    model = random_model(small("llama-3.1-8b"), torch.float32, "cpu")
    ids = torch.randint(model.vocab, (70,), generator=torch.Generator().manual_seed(0))
    expected = plain_pass(model, ids)
    assert divergence(expected, by_steps(model, ids)).abs().max() < 1e-6
    coarse, fine = (divergence(expected, with_rounded_inputs(model, ids, group)).mean() for group in (16, 4))
    assert 0 < fine < coarse
    x = torch.randn(3, 32)
    assert (rounded(x, 16) - x).abs().max() <= x.abs().max() / 254 * 1.001
