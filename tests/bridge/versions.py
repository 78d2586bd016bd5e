"""Runs the tests of the bridge with several versions of transformers: `python -m tests.bridge.versions [VERSION …]`

For each version an environment is made that has this one's packages, PyTorch among them, and that transformers in front
of them. Further arguments of pytest come after `--`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.environment import environment

VERSIONS = ("5.17.0", "5.22.2")  # the oldest and the newest that are tested
ROOT = Path(__file__).resolve().parents[2]


def run(version: str, arguments: list[str]) -> bool:
    """True if the tests pass with this version."""
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder), f"transformers=={version}")
        paths = os.environ | {"PYTHONPATH": str(ROOT)}
        script = "import transformers; print(transformers.__version__)"
        found = subprocess.run([python, "-c", script], stdout=subprocess.PIPE, text=True, env=paths)
        if found.stdout.strip() != version:
            sys.exit(f"the environment has transformers {found.stdout.strip()}, not {version}")
        print(f"transformers {version}", flush=True)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/bridge", *arguments]
        return subprocess.run(command, cwd=ROOT, env=paths).returncode == 0


def main() -> None:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    failed = [version for version in given[:cut] or VERSIONS if not run(version, given[cut + 1 :])]
    if failed:
        sys.exit(f"tests/bridge fails with transformers {', '.join(failed)}")


if __name__ == "__main__":
    main()
