"""Building native code: flags by suffix, one build for several processes, machines without a working compiler or a
writable home, libraries that the package ships."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.native import build

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'
GENERATE = """
import torch, lamina
from lamina.bench.random_model import random_model
from lamina.native.library import why_not
model = random_model(
    dict(model_type="llama", vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    num_attention_heads=4, rms_norm_eps=1e-5, max_position_embeddings=64), torch.float32, "cpu", weights="int8")
print(len(model.generate([[1, 2, 3]], 4).tokens[0]))
print(why_not())
print(model.explain().splitlines()[:2])
"""


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_files_for_other_machines_are_not_compiled(tmp_path: Path) -> None:
    for name in ("plain.cpp", "fast_avx2.cpp", "fast_avx512.cpp", "fast_neon.cpp"):
        write(tmp_path, name, "")
    assert [file.stem for file in build.sources(tmp_path, "x86_64")] == ["fast_avx2", "fast_avx512", "plain"]
    assert [file.stem for file in build.sources(tmp_path, "aarch64")] == ["fast_neon", "plain"]
    assert [file.stem for file in build.sources(tmp_path, "riscv64")] == ["plain"]
    assert "-mavx2" in build.flags(Path("fast_avx2.cpp")) and "-mavx2" not in build.flags(Path("plain.cpp"))


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    file = write(tmp_path, "answer.cpp", ANSWER)
    compiler = write(tmp_path, "counted", f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nsleep 0.2\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from lamina.native.build import compile_library;"
        "print(compile_library([Path(sys.argv[1])], Path(sys.argv[2]), []))"
    )
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "cache")]
    environment = os.environ | {"CXX": str(compiler)}
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    paths = {run.communicate()[0].strip() for run in runs}
    assert len(paths) == 1 and not any(run.returncode for run in runs)
    assert ctypes.CDLL(paths.pop()).answer() == 42
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".lock", ".so"]
    calls = [line for line in (tmp_path / "calls").read_text().splitlines() if line != "--version"]
    assert len(calls) == 2  # one file is compiled, and the library is linked


def test_another_source_is_another_library(tmp_path: Path) -> None:
    first = build.compile_library([write(tmp_path, "a.cpp", "int a;")], tmp_path, [])
    assert build.compile_library([write(tmp_path, "a.cpp", "int b;")], tmp_path, []) != first


def test_an_error_of_the_compiler_is_shown_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="not_declared"):
        build.compile_library([write(tmp_path, "bad.cpp", "int a = not_declared;")], tmp_path / "cache", [])
    assert not list((tmp_path / "cache").glob("*.so"))


def test_without_a_compiler_the_error_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r"install g\+\+ or clang, or set CXX"):
        build.compiler()
    monkeypatch.setenv("CXX", "nonsense -O2")
    with pytest.raises(
        build.BuildError, match="CXX=nonsense -O2: there is no program nonsense; name a C\\+\\+ compiler"
    ):
        build.compiler()


def test_cxx_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env c++")
    assert build.compiler() == ["env", "c++"]
    assert ctypes.CDLL(str(build.compile_library([write(tmp_path, "a.cpp", ANSWER)], tmp_path, []))).answer() == 42


def test_without_a_compiler_a_cached_library_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "answer.cpp", ANSWER)
    made = build.compile_library([file], tmp_path, [])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert build.compile_library([file], tmp_path, []) == made
    write(tmp_path, "answer.cpp", ANSWER.replace("42", "43"))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found"):
        build.compile_library([file], tmp_path, [])


def unwritable(folder: Path) -> Path:
    """A path in which nobody can make a folder, root neither: it is below a file."""
    folder.mkdir(parents=True, exist_ok=True)
    return write(folder, "file", "") / "cache"


def test_where_home_cannot_be_written_a_private_folder_has_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "sources", lambda: [write(tmp_path, "answer.cpp", ANSWER)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(build.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(unwritable(tmp_path / "home")))
    with caplog.at_level("WARNING", logger="lamina"):
        made = build.build()
    assert made.parent == tmp_path / f"lamina-native-{os.getuid()}" and made.parent.stat().st_mode & 0o777 == 0o700
    assert (
        "native kernels cannot be written to" in caplog.text and "Set LAMINA_NATIVE_CACHE to keep them" in caplog.text
    )
    made.parent.chmod(0o777)
    with pytest.raises(build.BuildError, match="belongs to another user, or others may write it"):
        build.build()
    monkeypatch.setenv(build.CACHE, str(unwritable(tmp_path / "own")))
    with pytest.raises(build.BuildError, match=r"own/file/.*: give another folder, LAMINA_NATIVE_CACHE"):
        build.build()


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("exit 1", r"broken --version fails with status 1: set CXX to a C\+\+ compiler"),
        (
            "[ $1 = --version ] || { echo x.h:1: fatal error: boom >&2; exit 4; }",
            r"failed with status 4: x\.h:1: fatal er",
        ),
    ],
)
def test_with_a_broken_compiler_everything_runs_through_pytorch(script: str, text: str, tmp_path: Path) -> None:
    broken = write(tmp_path, "broken", f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    found = generated(tmp_path, CXX=str(broken))
    assert found[0] == "4" and re.search(text, found[1])
    assert "decoding: plain passes, since " in found[2] and "by dequantizing blocks of rows in PyTorch" in found[2]


def generated(folder: Path, **environment: str) -> list[str]:
    """What a process prints that generates with packed weights and an empty cache."""
    done = subprocess.run(
        [sys.executable, "-c", GENERATE], env=os.environ | {build.CACHE: str(folder / "cache")} | environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_library_that_the_package_ships_is_taken_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.build()  # that of this machine
    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    assert build.shipped() == []
    shutil.copy(made, tmp_path / made.name)
    write(tmp_path, f"{made.name.rsplit('-', 1)[0]}-0.so", "no library, as one for another C library would be")
    write(tmp_path, "lamina-linux-riscv64-0123456789abcdef-0.so", "of another machine")
    assert [path.name for path in build.shipped()] == sorted([made.name, f"{made.name.rsplit('-', 1)[0]}-0.so"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(build.CACHE, str(tmp_path / "empty"))
    assert build.load()._name == str(tmp_path / made.name) and not (tmp_path / "empty").exists()
