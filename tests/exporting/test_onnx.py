"""The target "onnx": models in onnxruntime, whose cache is inputs and outputs, give the tokens of eager passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lamina
from lamina import Program, ProgramError
from lamina.attention.window import Sliding
from lamina.exporting.onnx import solve_unit_lower
from lamina.recurrence import GatedDelta
from tests.exporting.stack import Mix, run_both
from tests.exporting.test_archive import with_values
from tests.exporting.text_model import check_commands
from tests.laws.toys import Attend, Recur, Toy

ROWS, CAPACITY, SLACK = 2, 40, 2


@pytest.fixture
def packages() -> None:
    for name in ("onnxruntime", "onnxscript"):
        pytest.importorskip(
            name, reason=f"needs {name}: `make export-targets` runs this test in an environment with it"
        )


@pytest.mark.usefixtures("packages")
def test_a_text_is_continued_from_the_command_line(tmp_path: Path) -> None:
    check_commands("onnx", tmp_path)


@pytest.mark.usefixtures("packages")
def test_onnx_models_equal_eager_passes_past_the_window_rewound_and_restarted(tmp_path: Path) -> None:
    rule = GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=2)
    model = Toy(
        Attend(Sliding(4)), Attend(), Recur(rule), Mix(), dtype=torch.float32
    )  # onnxruntime lacks operations for float64
    lamina.export(model, ROWS, CAPACITY, slack=SLACK, chunk=7, target="onnx", to=tmp_path / "model")
    program, cache = Program.load(tmp_path / "model"), model.new_cache(ROWS, capacity=CAPACITY, slack=SLACK)
    for seed in range(3):
        run_both(model, cache, program, 9, seed=seed, tolerance=1e-4)
        program.rewind([1, 2])
        cache.rewind([1, 2])
    program.reset([0])
    cache.reset([0])
    run_both(model, cache, program, 9, seed=3, tolerance=1e-4)

    weights = (tmp_path / "model" / "weights.bin").stat().st_size
    weight = model.embedding.weight.detach().numpy().tobytes()
    assert (tmp_path / "model" / "weights.bin").read_bytes().count(weight) == 1
    assert not any(weight in file.read_bytes() for file in (tmp_path / "model").glob("*.onnx"))
    (tmp_path / "model" / "weights.bin").write_bytes(b"0" * weights)
    with pytest.raises(ProgramError, match=r"weights.bin in .* was altered or cut short: export the model again"):
        Program.load(tmp_path / "model")


@pytest.mark.usefixtures("packages")
def test_a_manifest_with_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    lamina.export(Toy(Attend(), dtype=torch.float32), 2, 8, chunk=3, target="onnx", to=tmp_path / "model")
    cache, file = Program.load(tmp_path / "model").manifest.cache, tmp_path / "model" / "manifest.json"
    text = file.read_bytes()
    for change in ({"shape": [2, 1]}, {"dtype": "int32"}):
        file.write_bytes(with_values(True, cache=cache | {"clock_lengths": cache["clock_lengths"] | change})(text))
        with pytest.raises(ProgramError, match=r"has no clock_lengths as program .* needs it\. Export"):
            Program.load(tmp_path / "model")
    file.unlink()
    with pytest.raises(ProgramError, match=r"has no manifest.json: it is not an exported program, or not all of it"):
        Program.load(tmp_path / "model")


def test_what_the_target_needs_is_checked_before_the_model_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("lamina.exporting.export.find_spec", lambda name: name)
    with pytest.raises(ProgramError, match="exists: give the path of a new folder"):
        lamina.export(Toy(Attend()), 1, 8, chunk=3, target="onnx", to=tmp_path)
    with pytest.raises(
        ProgramError, match="the target onnx is for CPUs, and the model is on meta: load it with device"
    ):
        lamina.export(Toy(Attend()).to("meta"), 1, 8, chunk=3, target="onnx", to=tmp_path / "model")
    monkeypatch.setattr("lamina.exporting.export.find_spec", lambda name: None)
    with pytest.raises(ProgramError, match="needs packages that are not installed: pip install onnx onnxscript"):
        lamina.export(Toy(Attend()), 1, 8, chunk=3, target="onnx", to=tmp_path / "model")


def test_a_unit_lower_triangular_system_is_solved_by_products() -> None:
    torch.manual_seed(0)
    for n in (1, 2, 3, 7, 16):
        a, b = (
            torch.randn(2, n, n, dtype=torch.float64).tril(-1) + torch.eye(n),
            torch.randn(2, n, 3, dtype=torch.float64),
        )
        expected = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
        torch.testing.assert_close(solve_unit_lower(a, b, upper=False, unitriangular=True), expected)
