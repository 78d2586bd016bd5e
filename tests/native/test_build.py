"""Building native code: flags by suffix, one build for several processes, and the compiler's errors."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.native import build


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
    text = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'
    file = write(tmp_path, "answer.cpp", text)
    code = (
        "import sys; from pathlib import Path; from lamina.native.build import compile_library;"
        "print(compile_library([Path(sys.argv[1])], Path(sys.argv[2]), []))"
    )
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "cache")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {run.communicate()[0].strip() for run in runs}
    assert len(paths) == 1 and not any(run.returncode for run in runs)
    assert ctypes.CDLL(paths.pop()).answer() == 42
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".lock", ".so"]


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
