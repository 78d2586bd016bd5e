"""Archives of exported programs: what they hold, and that a cut, altered or foreign one is refused by name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina import Program, ProgramError
from lamina.exporting.manifest import _checksum
from tests.exporting.stack import run_both
from tests.laws.toys import Attend, Toy

MODEL = Toy(Attend())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "model.pt2"
    lamina.export(MODEL, 2, 20, chunk=7, to=path)
    return path


def rewritten(file: Path, to: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    """A copy of the archive in which one entry is changed."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(to, "w") as new:
        for entry in old.namelist():
            new.writestr(entry, change(old.read(entry)) if entry == name else old.read(entry))
    return to


def with_values(sign: bool, **values: Any) -> Callable[[bytes], bytes]:
    """Changes values of the manifest; `sign` also makes its checksum fit again."""

    def change(text: bytes) -> bytes:
        manifest = json.loads(text) | values
        return json.dumps(manifest | ({"checksum": _checksum(manifest)} if sign else {})).encode()

    return change


def test_a_loaded_file_equals_eager_passes(file: Path) -> None:
    run_both(MODEL, MODEL.new_cache(2, capacity=20), Program.load(file), 20, seed=0)


def test_weights_are_stored_once_and_the_cache_not_at_all(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        programs = [archive.read(name) for name in sizes if name.startswith("programs/")]
    weights = sum(parameter.nbytes + 64 for parameter in MODEL.parameters())  # each at a multiple of 64 bytes
    assert sizes["weights.bin"] <= weights + 64 * len(Program.load(file).manifest.weights)
    first = MODEL.embedding.weight.detach().numpy().tobytes()[:32]
    assert len(programs) == 2 and not any(first in program for program in programs)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("manifest.json", lambda text: text[:-9], "the manifest of .* is not JSON: .*Export the model again"),
        ("manifest.json", with_values(False, rows=3), "was altered: its checksum is not .*Export the model again"),
        ("manifest.json", with_values(False, fingerprint={}), "was altered: its checksum is not"),
        ("manifest.json", with_values(True, version=7), "has version 7 of the format, and this Lamina reads 2: export"),
        ("manifest.json", with_values(True, format="other"), "is not an exported program: lamina export PATH --to"),
        ("manifest.json", with_values(True, target="tpu"), "is for the target 'tpu', which this Lamina does not run"),
        ("manifest.json", with_values(True, cache={}), "has no .* as program .* needs it. Export the model again"),
        (
            "manifest.json",
            with_values(True, cache={"clock_lengths": {"shape": [2], "dtype": "int3"}}),
            "gives clock_lengths the dtype 'int3', which this Lamina does not know: export the model again",
        ),
        ("manifest.json", with_values(True, more=1), r"has \['more'\] besides: export the model again"),
        ("weights.bin", lambda data: b"1" + data[1:], "weights.bin in .* was altered or cut short: export the model"),
        ("weights.bin", lambda data: data[:-5], "weights.bin in .* was altered or cut short: export the model again"),
        ("programs/decode.pt2", lambda data: data[:-5], "decode.pt2 in .* was altered or cut short: export the model"),
    ],
)
def test_a_damaged_archive_is_refused_by_name(
    file: Path, tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        Program.load(rewritten(file, tmp_path / "damaged.pt2", name, change))


def test_files_that_are_no_archives_are_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"there is no file .*: lamina export PATH --to FILE makes one"):
        Program.load(tmp_path / "none.pt2")
    cut = tmp_path / "cut.pt2"
    cut.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ProgramError, match="is not an exported program, or was cut short"):
        Program.load(cut)
    with pytest.raises(ProgramError, match=r"has no manifest.json: it is not an exported program"):
        Program.load(tmp_path)
