"""The target "aotinductor": compiled programs give the tokens of eager passes, in Python and in C++."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import WhisperConfig

import lamina
from docs.tiny_models import build as build_model
from lamina import Cache, Program, ProgramError
from lamina.attention.window import Sliding
from lamina.exporting.aotinductor import check_libraries, compile_to
from lamina.exporting.build_decode import build
from lamina.recurrence import SelectiveScan
from tests.exporting.commands import printed
from tests.exporting.kinds import FAST
from tests.exporting.stack import run_both
from tests.exporting.test_archive import with_values
from tests.families.encoder_decoder_cases import WHISPER_SIZES
from tests.families.harness import loaded
from tests.laws.toys import Attend, Recur, Toy

ROWS, CAPACITY, SLACK = 2, 40, 2

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def model() -> Toy:
    """A ring, a line and a state. Every kind of memory is compiled by every_kind.py."""
    return Toy(Attend(Sliding(4)), Attend(), Recur(SelectiveScan(channels=4, state=3)))


@pytest.fixture(scope="module")
def folder(model: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aotinductor") / "model"
    compile_to(lamina.export(model, ROWS, CAPACITY, slack=SLACK, chunk=7), path, **FAST)
    return path


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("decode") / "decode", "-O0")


def new_cache(model: Toy) -> Cache:
    return model.new_cache(ROWS, capacity=CAPACITY, slack=SLACK)


def test_a_compiled_program_equals_eager_passes_past_its_window(model: Toy, folder: Path) -> None:
    program, cache = Program.load(folder), new_cache(model)
    for seed in range(3):
        run_both(model, cache, program, 9, seed=seed)
        program.rewind([1, 2])
        cache.rewind([1, 2])
    program.reset([0])
    cache.reset([0])
    run_both(model, cache, program, 9, seed=3)


def test_weights_are_stored_once_and_in_no_library(model: Toy, folder: Path) -> None:
    weight = model.embedding.weight.detach().numpy().tobytes()
    assert (folder / "weights.bin").read_bytes().count(weight) == 1
    for package in (folder / "programs").iterdir():
        with zipfile.ZipFile(package) as archive:
            assert not any(weight in archive.read(name) for name in archive.namelist())


def test_the_cpp_program_decodes_the_tokens_of_eager_passes(model: Toy, folder: Path, decode: Path) -> None:
    def run(*commands: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([decode, folder], input="\n".join(commands), capture_output=True, text=True)

    start = ["feed 1,2,3,4,5,6,7,8,9 10,11", "decode 16"]  # four times past the window
    back = ["rewind 2 1", "feed 3 -", "feed - 4", "decode 6"]
    commands = [*start, *back, "reset 1", "feed - 5,6,7", "decode 3", "reset", *start]
    done = run(*commands)
    assert done.returncode == 0, done.stderr
    assert [[int(i) for i in line.split()] for line in done.stdout.splitlines()] == printed(
        model, new_cache(model), commands
    )

    refused = run("feed 1 2", "decode 40")
    assert refused.returncode == 1
    assert "row 0 holds 40 tokens and 1 more were given, but the program has room for 40" in refused.stderr
    assert "ids are 0 to 12" in run("feed 13 -").stderr
    assert "row 0 cannot be rewound by 3" in run("feed 1,2,3,4,5,6,7,8,9 -", "rewind 3 0").stderr
    assert "1 lists of ids were given, and the program has 2 rows" in run("feed 1").stderr
    assert "this model reads no source: only encoder-decoder models do" in run("encode 1 2").stderr
    assert "'two' is not a number" in run("decode two").stderr
    assert "there is no row 2" in run("reset 2").stderr


ALTERED = "{} in .* was altered or cut short: export the model again"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tensors.txt", lambda data: data.replace(b"rows 2", b"rows 3"), ALTERED),
        ("tensors.txt", lambda data: data[:-20], ALTERED),
        (
            "tensors.txt",
            lambda data: signed(data.replace(b"format 2", b"format 7")),
            "has version 7 of the format, and",
        ),
        ("tensors.txt", None, "has no tensors.txt: export with the target aotinductor"),
        (
            "tensors.txt",
            lambda data: signed(data.replace(b"cache clock_lengths int64 0 2", b"cache clock_lengths int64 0 3")),
            r"{} has no clock_lengths as program \w+ needs it \(int64 2\): export the model again",
        ),
        ("weights.bin", lambda data: b"1" + data[1:], ALTERED),
        ("weights.bin", lambda data: data[:-5], ALTERED),
        ("weights.bin", lambda data: data + b"0", ALTERED),
        ("programs/decode.pt2", lambda data: data[:-5], ALTERED),
        ("programs/rewind.pt2", None, ALTERED),
    ],
)
def test_a_damaged_folder_is_refused_in_cpp(
    folder: Path, decode: Path, tmp_path: Path, name: str, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    if change is None:
        (tmp_path / "model" / name).unlink()
    else:
        (tmp_path / "model" / name).write_bytes(change((folder / name).read_bytes()))
    done = subprocess.run([decode, tmp_path / "model"], input="", capture_output=True, text=True)
    assert done.returncode == 1 and re.search(message.format(name), done.stderr), done.stderr
    if name != "tensors.txt":  # which Python does not read
        with pytest.raises(ProgramError, match=f"{name} in .* was altered or cut short|has no {name}: it is not"):
            Program.load(tmp_path / "model")


def signed(data: bytes) -> bytes:
    """tensors.txt with a checksum that fits."""
    text = data[: data.rindex(b"checksum")]
    return text + f"checksum {zlib.crc32(text):08x}\n".encode()


def test_a_manifest_with_another_shape_or_dtype_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    file, cache = tmp_path / "model" / "manifest.json", Program.load(folder).manifest.cache
    for change in ({"shape": [ROWS, 1]}, {"dtype": "int32"}):
        altered = cache | {"clock_lengths": cache["clock_lengths"] | change}
        file.write_bytes(with_values(True, cache=altered)((folder / "manifest.json").read_bytes()))
        with pytest.raises(ProgramError, match=r"has no clock_lengths as program .* needs it\. Export"):
            Program.load(tmp_path / "model")


def test_the_cpp_program_reads_the_features_of_a_whisper_model(decode: Path, tmp_path: Path) -> None:
    small = dict(encoder_layers=1, decoder_layers=1, max_source_positions=6, num_mel_bins=5, eos_token_id=102)
    torch.manual_seed(0)
    model = loaded(build_model(WhisperConfig(**WHISPER_SIZES | small))).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # else it repeats one token
    compile_to(lamina.export(model, ROWS, CAPACITY, chunk=7), tmp_path / "model", **FAST)

    def run(*commands: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([decode, tmp_path / "model"], input="\n".join(commands), capture_output=True, text=True)

    frames = torch.randn(ROWS, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, given in {"all": frames, "short": frames[..., :9], "long": torch.zeros(ROWS, 5, 13).double()}.items():
        (tmp_path / name).write_bytes(given.contiguous().numpy().tobytes())
    first = [f"features {tmp_path / 'all'} 12 7", "feed 91 91,5,6", "decode 20"]
    second = ["reset 1", f"features {tmp_path / 'short'} 0 9", "feed - 91", "decode 5"]  # row 0 keeps its source
    done = run(*first, *second)
    assert done.returncode == 0, done.stderr
    lines = [[int(i) for i in line.split()] for line in done.stdout.splitlines()]
    assert lines == printed(model, model.new_cache(ROWS, capacity=CAPACITY), [*first, *second])

    assert (
        "the source is 13 long, and the program was exported for 12" in run(f"features {tmp_path / 'long'} 1 1").stderr
    )
    assert "a row cannot have 13 of 12 features" in run(f"features {tmp_path / 'all'} 13 1").stderr
    assert "1 counts were given, and the program has 2 rows" in run(f"features {tmp_path / 'all'} 12").stderr
    (tmp_path / "cut").write_bytes(frames.numpy().tobytes()[:-8])
    assert "cut has 952 bytes, and a frame of all rows 80" in run(f"features {tmp_path / 'cut'} 12 12").stderr
    assert "there is no file" in run(f"features {tmp_path / 'none'} 1 1").stderr
    assert "the source of this model is features, a tensor, and not ids" in run("encode 1 2").stderr
    assert "row 0 has no source: call encode before its first token" in run("feed 91 91").stderr


def test_the_cpp_program_is_built_by_the_compiler_that_cxx_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'import sys; sys.exit(\"not today\")'")
    with pytest.raises(ProgramError, match="not today"):
        build(tmp_path / "decode")
    monkeypatch.setenv("CXX", "nowhere-g++ -O1")
    with pytest.raises(
        ProgramError, match=r"there is no C\+\+ compiler 'nowhere-g\+\+' on this machine: install g\+\+"
    ):
        build(tmp_path / "decode")


def test_a_folder_whose_compilation_fails_is_removed(
    model: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **options: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        compile_to(lamina.export(Toy(Attend()), 1, 8, chunk=3), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_that_exists_is_not_overwritten(model: Toy, folder: Path) -> None:
    with pytest.raises(ProgramError, match="give the path of a new folder"):
        compile_to(None, folder)  # type: ignore[arg-type]  # refused before the programs are looked at
    with pytest.raises(ProgramError, match="give the path of a new folder"):
        lamina.export(model, 1, 8, chunk=9, to=folder, target="aotinductor")  # before other arguments are looked at


@pytest.mark.skipif(sys.platform != "linux", reason="the C++ libraries of Linux")
def test_a_library_with_a_cpp_library_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "step.cpp", tmp_path / "step.so"
    source.write_text("#include <iostream>\nvoid step() { std::cout << 1; }\n")

    def package(*flags: str) -> Path:
        subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library, *flags], check=True)
        with zipfile.ZipFile(tmp_path / "package.pt2", "w") as archive:
            archive.write(library, "model/step.so")
        return tmp_path / "package.pt2"

    check_libraries(package())
    monkeypatch.setenv("CXX", "/opt/bin/g++")
    with pytest.raises(ProgramError, match=r"step.so has a C.* of its own.*compiler /opt/bin/g.. links .* statically"):
        check_libraries(package("-static-libstdc++"))
