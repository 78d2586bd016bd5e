"""Test programs in C++, under ASan and UBSan: all paths of products, kernels that select tokens, codes in order."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lamina.native import build

PROGRAM = Path(__file__).with_name("products_test.cpp")
PRODUCTS = sorted(build.SOURCES.glob("product*.cpp"))
HEADERS = [*build.SOURCES.glob("*.h")]
FILES = {"products_test": PRODUCTS, "selection_test": build.sources(), "codes_test": []}
"""Test program -> the sources that it is linked with."""

SANITIZED = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.mark.parametrize("program", FILES)
def test_kernels_equal_plain_loops_under_the_sanitizers(program: str) -> None:
    files = [file for file in build.sources() if file in FILES[program]]
    source = PROGRAM.with_name(f"{program}.cpp")
    made = build.compile_library([*files, source], build.cache_folder(), HEADERS, SANITIZED, program=True)
    run = subprocess.run([made], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert run.stdout.endswith("compared, 0 differ\n")


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="needs g++-aarch64-linux-gnu and qemu-user",
)
def test_neon_equals_the_reference_in_an_emulator(tmp_path: Path) -> None:
    objects = []
    for file in [*build.sources(machine="aarch64"), PROGRAM]:
        if file.stem.startswith("product"):
            objects.append(tmp_path / f"{file.stem}.o")
            flags = [*build.flags(file), f"-I{build.SOURCES}", "-O0"]
            subprocess.run(["aarch64-linux-gnu-g++", *flags, "-c", file, "-o", objects[-1]], check=True)
    program = tmp_path / "products_test"
    subprocess.run(["aarch64-linux-gnu-g++", "-static", *objects, "-o", program], check=True)
    run = subprocess.run(["qemu-aarch64", "-cpu", "max", program], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith("compared, 0 differ\n"), run.stdout
