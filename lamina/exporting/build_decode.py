"""Builds the C++ decode program (cpp/decode.cpp): `python -m lamina.exporting.build_decode PATH`

It uses the compiler of this machine and links PyTorch's libraries where they are installed, and nothing of Python.
Where CMake is preferred, cpp/CMakeLists.txt does the same.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from lamina.errors import ProgramError

SOURCE = Path(__file__).parent / "cpp" / "decode.cpp"


def build(path: str | os.PathLike[str], optimize: str = "-O2", compiler: str | None = None) -> Path:
    """Compiles the program to `path`, with `compiler`, or what CXX names, or g++; both may have arguments. About 10 s.
    -> the path

    >>> build("decode")           # doctest: +SKIP
    PosixPath('decode')
    """
    called = shlex.split(compiler or os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(called[0]) is None:
        raise ProgramError(
            f"there is no C++ compiler {called[0]!r} on this machine: install g++ 11 or newer, or set CXX"
        )
    root = Path(torch.__file__).parent
    names = ["torch", "torch_cpu", "c10"]
    if torch.version.cuda is not None:
        names += ["torch_cuda", "c10_cuda"]
    flags = [optimize, "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    folders = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", f"-L{root / 'lib'}"]
    # Without --no-as-needed the linker drops torch_cuda, which registers CUDA when it is loaded.
    linked = [f"-Wl,-rpath,{root / 'lib'}", "-Wl,--no-as-needed", *(f"-l{name}" for name in names)]
    command = [*called, *flags, *folders, str(SOURCE), "-o", str(path), *linked]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ProgramError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return Path(path)


if __name__ == "__main__":
    print(build(sys.argv[1] if len(sys.argv) > 1 else "decode"))
