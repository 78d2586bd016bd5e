"""Runs the tests of export targets on every kind of memory: `python -m tests.exporting.targets [TARGET …]`

For onnx and executorch an environment is made that has this one's packages and those of the target; pt2 and aotinductor
need none. Further arguments of pytest come after `--`. A target takes 10 to 20 minutes of one core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lamina.exporting.export import TARGETS
from tests.environment import environment

NEEDS = {"onnx": ["onnx", "onnxscript", "onnxruntime"], "executorch": ["executorch"]}
TESTS = {"pt2": "programs"}  # target -> name of its own file of tests, if that is not the target's
ROOT = Path(__file__).resolve().parents[2]


def run(target: str, arguments: list[str]) -> bool:
    """True if the tests of this target pass, none of them skipped for a package."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(sys.executable)
        if target in NEEDS:
            begin = time.perf_counter()
            python = environment(Path(folder), *NEEDS[target])
            print(f"{target}: installed in {time.perf_counter() - begin:.0f} s", flush=True)
        paths = os.environ | {"PYTHONPATH": str(ROOT)}
        pytest = [python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
        own = subprocess.run(
            [*pytest, f"tests/exporting/test_{TESTS.get(target, target)}.py", *arguments], cwd=ROOT, env=paths
        )
        kinds = [*pytest, "tests/exporting/every_kind.py", "-k", target, *arguments]
        return subprocess.run(kinds, cwd=ROOT, env=paths).returncode == 0 and own.returncode == 0


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    if unknown := set(given[:cut]) - set(TARGETS):
        sys.exit(f"{', '.join(sorted(unknown))}: the targets are {', '.join(TARGETS)}")
    failed = [target for target in given[:cut] or TARGETS if not run(target, given[cut + 1 :])]
    if failed:
        sys.exit(f"the tests of {', '.join(failed)} fail")


if __name__ == "__main__":
    main()
