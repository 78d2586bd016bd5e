"""Builds the C++ of `src/` into one shared library, once for each version of the sources, the flags and the compiler.

A library that the package ships for this machine (`shipped/`, see `lamina build --into`) is taken first. Others are
cached under `$LAMINA_NATIVE_CACHE`, else `$XDG_CACHE_HOME/lamina/native`, else `~/.cache/lamina/native`; where that
cannot be written, in a private folder for temporary files. A file's suffix selects the instructions that its code may
use; which of them run is decided when the library is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from lamina.errors import LaminaError
from lamina.notices import notice

SOURCES = Path(__file__).parent / "src"
SHIPPED = Path(__file__).parent / "shipped"
CACHE = "LAMINA_NATIVE_CACHE"
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


def compiler() -> list[str]:
    """The command of the C++ compiler: `$CXX`, else the first of c++, g++ and clang++ that is installed."""
    if given := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(given[0]) is None:
            raise BuildError(
                f"CXX={os.environ['CXX']}: there is no program {given[0]}; name a C++ compiler, or unset CXX"
            )
        return given
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise BuildError("no C++ compiler found ($CXX, c++, g++, clang++): install g++ or clang, or set CXX")


def sources(folder: Path = SOURCES, machine: str = "") -> list[Path]:
    """The C++ files of `folder` that are compiled on `machine` (this one by default), in order of their names."""
    machine = machine or platform.machine()
    return [file for file in sorted(folder.glob("*.cpp")) if machine in (_suffix(file) or ((machine,), []))[0]]


def flags(file: Path) -> list[str]:
    """The flags that `file` is compiled with, which follow from the suffix of its name."""
    return [*FLAGS, *(_suffix(file) or ((), []))[1]]


def load() -> ctypes.CDLL:
    """The native library, opened: the one that the package ships for this machine, else the one that is built here."""
    for path in shipped():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # made for a newer C library than this machine has
            continue
    return ctypes.CDLL(str(build()))


def is_built() -> bool:
    """True if this machine has a library of these sources, so that `load` most likely compiles nothing."""
    stem = _stem(sources(), SOURCES.glob("*.h"))
    return bool(shipped()) or any(any(folder.glob(f"{stem}-*.so")) for folder in (cache_folder(), _private_path()))


def shipped() -> list[Path]:
    """Libraries of these sources for this kind of machine that the package came with."""
    if not SHIPPED.is_dir():
        return []
    return sorted(SHIPPED.glob(f"{_stem(sources(), SOURCES.glob('*.h'))}-*.so"))


def build(into: Path | None = None) -> Path:
    """The path of the native library, which is compiled first unless the cache has it.

    into   the folder for it; None: the cache

    >>> from lamina.native.build import build
    >>> build().suffix
    '.so'
    """
    folder, headers = into or cache_folder(), sorted(SOURCES.glob("*.h"))
    try:
        return compile_library(sources(), folder, headers)
    except OSError as problem:
        why = f"native kernels cannot be written to {folder} ({problem.strerror or problem})"
        if into is not None or os.environ.get(CACHE):
            raise BuildError(f"{why}: give another folder, {CACHE} for a cache") from problem
        try:
            private = private_folder()
            notice(f"{why}; they go to {private}. Set {CACHE} to keep them", unexpected=True)
            return compile_library(sources(), private, headers)
        except OSError as second:
            raise BuildError(f"{why}, nor to temporary files ({second}): set {CACHE} to another folder") from problem


def cache_folder() -> Path:
    """The folder that built libraries are cached in."""
    if own := os.environ.get(CACHE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lamina" / "native"


def _private_path() -> Path:
    return Path(tempfile.gettempdir()) / f"lamina-native-{os.getuid()}"


def private_folder() -> Path:
    """A folder for temporary files that this user alone may write: a library that is loaded from there is their own."""
    folder = _private_path()
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise BuildError(f"{folder} belongs to another user, or others may write it: set {CACHE} to another folder")
    return folder


def compile_library(
    files: Sequence[Path], folder: Path, headers: Iterable[Path], extra: Sequence[str] = (), program: bool = False
) -> Path:
    """Compiles `files` with the flags of their suffixes and `extra` into a library in `folder`, unless it is there.

    Processes that want the same library at once wait for the first of them. The library appears under its final name
    only when it is complete. With `program`, an executable is made instead. Without a compiler a library of another
    compiler is taken, if the folder has one of these sources.
    """
    stem, suffix = _stem(files, headers, extra, program), "" if program else ".so"
    try:
        command = compiler()
    except BuildError:
        if found := sorted(folder.glob(f"{stem}-*.so")):
            return found[0]
        raise
    library = folder / f"{stem}-{hashlib.sha256(_version(command).encode()).hexdigest()[:8]}{suffix}"
    if library.exists():
        return library
    notice(f"compiling native kernels with {command[0]}, once for this version: about half a minute", unexpected=True)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(library.with_suffix(".lock")):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                linking = [*extra, *([] if program else ["-shared"])]
                os.replace(_compile(command, files, Path(scratch), extra, linking), library)
    return library


def _stem(files: Sequence[Path], headers: Iterable[Path], extra: Sequence[str] = (), program: bool = False) -> str:
    """What the names of all libraries of these sources for this kind of machine begin with."""
    digest = hashlib.sha256(f"{list(extra)}{program}".encode())
    for file in [*files, *sorted(headers)]:
        digest.update(f"{file.name}{flags(file)}".encode() + file.read_bytes())
    return f"lamina-{sys.platform}-{platform.machine()}-{digest.hexdigest()[:16]}"


def _version(command: Sequence[str]) -> str:
    """What tells one compiler from another."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    except OSError as problem:
        raise BuildError(f"{command[0]} cannot be run ({problem}): set CXX to a C++ compiler") from problem
    if done.returncode:
        raise BuildError(
            f"{shlex.join(command)} --version fails with status {done.returncode}: set CXX to a C++ compiler"
        )
    return f"{command}{done.stdout}"


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds a lock that other processes wait for."""
    try:
        import fcntl
    except ImportError:
        raise BuildError(f"native kernels are built on Linux and macOS, not on {sys.platform}") from None
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(
    command: Sequence[str], files: Sequence[Path], scratch: Path, extra: Sequence[str], linking: Sequence[str]
) -> Path:
    def one(file: Path) -> Path:
        made = scratch / f"{file.stem}.o"
        _run([*command, *flags(file), f"-I{SOURCES}", *extra, "-c", str(file), "-o", str(made)])
        return made

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(one, files))
    linked = scratch / "lamina"
    _run([*command, "-pthread", *linking, *map(str, objects), "-o", str(linked)])
    return linked


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[-1] if lines else "it prints nothing")
        text = f"the C++ compiler {command[0]} failed with status {done.returncode}: {first}"
        raise BuildError(f"{text}\n{shlex.join(command)}\n{done.stderr[-4000:]}")


def _suffix(file: Path) -> tuple[tuple[str, ...], list[str]] | None:
    return next((rule for suffix, rule in SUFFIXES.items() if file.stem.endswith(suffix)), None)


if __name__ == "__main__":
    print(build())
