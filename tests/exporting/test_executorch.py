"""The target "executorch": methods of one .pte file, whose cache ExecuTorch holds, give the tokens of eager passes."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import lamina
from lamina import Program, ProgramError
from lamina.attention.window import Sliding
from lamina.exporting.executorch import fitted
from lamina.recurrence import GatedDelta, SelectiveScan
from tests.exporting.stack import Translator, run_both
from tests.exporting.test_archive import with_values
from tests.exporting.text_model import check_commands
from tests.laws.toys import Attend, AttendCross, Convolve, Highest, Recur, Toy, random_ids

ROWS, CAPACITY, SLACK = 2, 40, 2
NEEDS = "needs the package executorch: `make export-targets` runs this test in an environment with it"


@pytest.fixture(scope="module")
def model() -> Toy:
    """A ring, a line, a state, a recurrence that solves triangular systems, and a convolution."""
    delta = GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=2)
    blocks = Attend(Sliding(4)), Attend(), Recur(SelectiveScan(channels=4, state=3)), Recur(delta), Convolve(3)
    return Toy(*blocks, dtype=torch.float32)


@pytest.fixture(scope="module")
def file(model: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("executorch", reason=NEEDS)
    path = tmp_path_factory.mktemp("executorch") / "model.pte"
    lamina.export(model, ROWS, CAPACITY, slack=SLACK, chunk=7, to=path)
    return path


def test_methods_equal_eager_passes_past_the_window_rewound_and_restarted(model: Toy, file: Path) -> None:
    program, cache = Program.load(file), model.new_cache(ROWS, capacity=CAPACITY, slack=SLACK)
    assert program.manifest.target == "executorch" and {"rewind", "reset"} < program.manifest.programs.keys()
    for seed in range(3):
        run_both(model, cache, program, 9, seed=seed, tolerance=1e-4)
        assert program.rewindable == cache.rewindable.tolist()
        program.rewind([1, 2])
        cache.rewind([1, 2])
    program.reset([0])
    cache.reset([0])
    run_both(model, cache, program, 9, seed=3, tolerance=1e-4)


def test_two_programs_of_one_file_have_caches_of_their_own(file: Path) -> None:
    first, second = Program.load(file), Program.load(file)
    first.feed([[1, 2, 3], [4]])
    assert first.cache["clock_lengths"].tolist() == [3, 1] and second.cache["clock_lengths"].tolist() == [0, 0]


def test_weights_are_in_the_file_once_and_the_cache_not_at_all(tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason=NEEDS)
    model = Toy(Attend(), dtype=torch.float32)
    size = {}
    for capacity in (40, 4000):
        lamina.export(model, 1, capacity, chunk=7, to=tmp_path / "model.pte")
        size[capacity] = (tmp_path / "model.pte").stat().st_size
    assert size[4000] < size[40] + 4096  # the cache has 100 times the bytes, all of them in memory alone
    weight = model.embedding.weight.detach().numpy().tobytes()
    assert (tmp_path / "model.pte").read_bytes().count(weight) == 1


def test_a_source_is_encoded_by_a_method_that_shares_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason=NEEDS)
    model = Translator(AttendCross()).to(torch.float32)
    lamina.export(model, ROWS, CAPACITY, chunk=7, source=9, to=tmp_path / "model.pte")
    program, cache = Program.load(tmp_path / "model.pte"), model.new_cache(ROWS, capacity=CAPACITY)
    sources = [random_ids(1, n, seed=n)[0].tolist() for n in (5, 9)]
    program.encode(sources)
    cache.attach(model.encode([sources[0]]), rows=[0]).attach(model.encode([sources[1]]), rows=[1])
    run_both(model, cache, program, 12, seed=0, tolerance=1e-4)


def test_a_text_is_continued_from_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason=NEEDS)
    check_commands("executorch", tmp_path)


def test_a_manifest_with_another_shape_or_dtype_is_refused(file: Path, tmp_path: Path) -> None:
    text, cache = zipfile.ZipFile(file).read("manifest.json"), Program.load(file).manifest.cache
    for i, change in enumerate(({"shape": [ROWS, 1]}, {"dtype": "int32"})):
        shutil.copy(file, copied := tmp_path / f"{i}.pte")
        altered = cache | {"clock_lengths": cache["clock_lengths"] | change}
        with zipfile.ZipFile(copied, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("manifest.json", with_values(True, cache=altered)(text))
        with pytest.raises(ProgramError, match=r"has no clock_lengths as program reset needs it\. Export"):
            Program.load(copied)


def test_damaged_files_and_missing_kernels_are_refused_by_name(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    (tmp_path / "damaged.pte").write_bytes(data)
    with pytest.raises(ProgramError, match=r"program.pte in .* was altered or cut short: export the model again"):
        Program.load(tmp_path / "damaged.pte")
    (tmp_path / "cut.pte").write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ProgramError, match="is not an exported program, or was cut short"):
        Program.load(tmp_path / "cut.pte")
    with zipfile.ZipFile(file) as archive:
        assert "weights.bin" not in archive.namelist() and "manifest.json" in archive.namelist()
    model = Toy(Highest(), dtype=torch.float32)
    with pytest.raises(ProgramError, match=r"ExecuTorch has no kernel for aten::cummax.out, which .* needs: use"):
        lamina.export(model, 1, 8, chunk=3, to=tmp_path / "model.pte")
    assert not (tmp_path / "model.pte").exists()


def test_without_the_package_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(ProgramError, match="needs packages that are not installed: pip install executorch"):
        lamina.export(Toy(Attend()), 1, 8, chunk=3, to=tmp_path / "model.pte")


@pytest.mark.parametrize("n", [4, -3, torch.tensor(3), torch.tensor([[3], [-4]])])
def test_a_remainder_has_the_sign_of_the_divisor(n: int | torch.Tensor) -> None:
    class Remainder(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x % n

    x = torch.arange(-9, 11).view(2, 10)
    program = fitted(torch.export.export(Remainder(), (x,)))
    assert not any("remainder" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x), x % n)
