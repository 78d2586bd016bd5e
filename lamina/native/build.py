"""Builds the C++ of `src/` into one shared library, once for each version of the sources, the flags and the compiler.

The library is cached under `$LAMINA_NATIVE_CACHE`, else `$XDG_CACHE_HOME/lamina/native`, else `~/.cache/lamina/native`.
A file's suffix selects the instructions that its code may use; which of them run is decided when the library is loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lamina.errors import LaminaError
from lamina.notices import notice

SOURCES = Path(__file__).parent / "src"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-pthread"]
SUFFIXES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "_avx2": (("x86_64", "AMD64"), ["-mavx2", "-mfma", "-mf16c"]),
    "_avx512": (
        ("x86_64", "AMD64"),
        [
            *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
            "-mprefer-vector-width=512",
        ],
    ),
    "_neon": (("aarch64", "arm64"), ["-march=armv8.2-a+dotprod"]),
}
"""Suffix of a file's name: the machines it is compiled on, and the flags of the instructions it may use."""


class BuildError(LaminaError, RuntimeError):
    """The native library cannot be built: there is no C++ compiler, or it reports an error."""


def compiler() -> str:
    """The C++ compiler: `$CXX`, else the first of c++, g++ and clang++ that is installed."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler found ($CXX, c++, g++, clang++): install g++ or clang, or set CXX")


def sources(folder: Path = SOURCES, machine: str = "") -> list[Path]:
    """The C++ files of `folder` that are compiled on `machine` (this one by default), in order of their names."""
    machine = machine or platform.machine()
    return [file for file in sorted(folder.glob("*.cpp")) if machine in (_suffix(file) or ((machine,), []))[0]]


def flags(file: Path) -> list[str]:
    """The flags that `file` is compiled with, which follow from the suffix of its name."""
    return [*FLAGS, *(_suffix(file) or ((), []))[1]]


def build() -> Path:
    """The path of the native library, which is compiled first unless the cache has it.

    >>> from lamina.native.build import build
    >>> build().suffix
    '.so'
    """
    return compile_library(sources(), cache_folder(), [*SOURCES.glob("*.h")])


def cache_folder() -> Path:
    """The folder that built libraries are cached in."""
    if own := os.environ.get("LAMINA_NATIVE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lamina" / "native"


def compile_library(
    files: Sequence[Path], folder: Path, headers: Iterable[Path], extra: Sequence[str] = (), program: bool = False
) -> Path:
    """Compiles `files` with the flags of their suffixes and `extra` into a library in `folder`, unless it is there.

    Processes that want the same library at once wait for the first of them. The library appears under its final name
    only when it is complete. With `program`, an executable is made instead.
    """
    compile_with = compiler()
    version = subprocess.run([compile_with, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(f"{compile_with}{version}{platform.machine()}{list(extra)}{program}".encode())
    for file in [*files, *sorted(headers)]:
        digest.update(f"{file.name}{flags(file)}".encode() + file.read_bytes())
    library = folder / f"lamina-{digest.hexdigest()[:20]}{'' if program else '.so'}"
    if library.exists():
        return library
    notice(f"compiling native kernels with {compile_with}, once for this version: about half a minute", unexpected=True)
    folder.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                linking = [*extra, *([] if program else ["-shared"])]
                os.replace(_compile(compile_with, files, Path(scratch), extra, linking), library)
    return library


def _compile(
    compile_with: str, files: Sequence[Path], scratch: Path, extra: Sequence[str], linking: Sequence[str]
) -> Path:
    def one(file: Path) -> Path:
        made = scratch / f"{file.stem}.o"
        _run([compile_with, *flags(file), f"-I{SOURCES}", *extra, "-c", str(file), "-o", str(made)])
        return made

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(one, files))
    linked = scratch / "lamina"
    _run([compile_with, "-pthread", *linking, *map(str, objects), "-o", str(linked)])
    return linked


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        text = f"the C++ compiler failed with status {done.returncode}: {' '.join(command)}"
        raise BuildError(f"{text}\n{done.stderr[-4000:]}")


def _suffix(file: Path) -> tuple[tuple[str, ...], list[str]] | None:
    return next((rule for suffix, rule in SUFFIXES.items() if file.stem.endswith(suffix)), None)


if __name__ == "__main__":
    print(build())
