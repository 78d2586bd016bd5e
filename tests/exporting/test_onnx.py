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
from tests.laws.toys import Attend, Recur, Toy

ROWS, CAPACITY, SLACK = 2, 40, 2


def test_onnx_models_equal_eager_passes_past_the_window_rewound_and_restarted(tmp_path: Path) -> None:
    for name in ("onnxruntime", "onnxscript"):
        pytest.importorskip(
            name, reason=f"needs {name}: `make export-targets` runs this test in an environment with it"
        )
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


def test_a_unit_lower_triangular_system_is_solved_by_products() -> None:
    torch.manual_seed(0)
    for n in (1, 2, 3, 7, 16):
        a, b = (
            torch.randn(2, n, n, dtype=torch.float64).tril(-1) + torch.eye(n),
            torch.randn(2, n, 3, dtype=torch.float64),
        )
        expected = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
        torch.testing.assert_close(solve_unit_lower(a, b, upper=False, unitriangular=True), expected)
