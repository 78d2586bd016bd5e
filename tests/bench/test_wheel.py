"""A wheel has all that `lamina bench` imports, nothing of this folder, and the native library that it ships."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from lamina.native.build import build

ROOT = Path(__file__).parent.parent.parent
MODULES = sorted(path.stem for path in (ROOT / "lamina" / "bench").glob("*.py") if path.stem != "__init__")
LOOK = f"""
import sys, lamina.cli.bench, lamina.bench
from lamina.bench import {", ".join(MODULES)}
print(lamina.__file__)
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("bench", "tests", "docs")))
"""
NATIVE = """
import lamina.native.build
from lamina.native.library import library, why_not
print(why_not(), library()._name)
"""


def test_a_wheel_holds_all_that_a_benchmark_imports(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(ROOT / "lamina", source / "lamina", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shipped = source / "lamina" / "native" / "shipped"
    shipped.mkdir(exist_ok=True)
    library = build()  # what `lamina build --into lamina/native/shipped` writes there
    shutil.copy(library, shipped / library.name)
    make = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", make], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("lamina/")}
        archive.extractall(installed)
    assert packed == {str(path.relative_to(source)) for path in (source / "lamina").rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines() == [str(installed / "lamina" / "__init__.py"), ""], done.stderr
    place = installed / "lamina" / "native" / "shipped" / library.name
    bare = {"PATH": "/nowhere", "PYTHONPATH": str(installed), "LAMINA_NATIVE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", NATIVE], cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.stdout.strip() == f"None {place}" and not (tmp_path / "cache").exists(), done.stderr
