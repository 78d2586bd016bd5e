"""An environment that has this one's packages, PyTorch among them, and further ones in front of them."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path


def environment(folder: Path, *requirements: str) -> Path:
    """Makes an environment with these requirements, and those of their packages that are missing here; -> its Python"""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip())
    (own / "packages.pth").write_text(sysconfig.get_path("purelib"))
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, *requirements], check=True)
    return python
