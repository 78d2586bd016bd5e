"""Runs the tests of export targets whose packages are optional: `python -m tests.exporting.targets [TARGET …]`

For each target, onnx and executorch, an environment is made that has this one's packages and those of the target.
Further arguments of pytest come after `--`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.environment import environment

NEEDS = {"onnx": ["onnx", "onnxscript", "onnxruntime"], "executorch": ["executorch"]}
ROOT = Path(__file__).resolve().parents[2]


def run(target: str, arguments: list[str]) -> bool:
    """True if the tests of this target pass, none of them skipped for a package."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        python = environment(Path(folder), *NEEDS[target])
        print(f"{target}: installed in {time.perf_counter() - begin:.0f} s", flush=True)
        paths = os.environ | {"PYTHONPATH": str(ROOT)}
        test = f"tests/exporting/test_{target}.py"
        command = [python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", test, *arguments]
        return subprocess.run(command, cwd=ROOT, env=paths).returncode == 0


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    if unknown := set(given[:cut]) - NEEDS.keys():
        sys.exit(f"{', '.join(sorted(unknown))}: the targets with packages of their own are {', '.join(NEEDS)}")
    failed = [target for target in given[:cut] or NEEDS if not run(target, given[cut + 1 :])]
    if failed:
        sys.exit(f"the tests of {', '.join(failed)} fail")


if __name__ == "__main__":
    main()
