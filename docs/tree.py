"""Writes docs/files.md, the file tree with one line per file, from the first sentence of each: `python docs/tree.py`"""

from __future__ import annotations

import ast
import subprocess
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["lamina", "bench", "docs"]
TESTS = "tests/".ljust(34) + "mirror the packages; laws/ holds the laws as properties, families/ the truth from outside"


def tree() -> str:
    """One line for each Python file that git knows, by folder, and one for all tests."""
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(name) for name in listed.stdout.split() if name.endswith(".py")]
    files.sort(key=lambda file: (FOLDERS.index(file.parts[0]), file.parent, file.name))
    lines: list[str] = []
    for folder, inside in groupby(files, key=lambda file: file.parent):
        names = list(inside)
        init = folder / "__init__.py"
        lines.append(f"{folder}/".ljust(34) + (first_line(init) if init in names else ""))
        for file in names:
            if file.name != "__init__.py":
                lines.append(f"  {file.name}".ljust(34) + first_line(file))
    return "\n".join(line.rstrip() for line in [*lines, TESTS])


def first_line(file: Path) -> str:
    """The first sentence of a file, without the file's own name in front of it."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")


def page() -> str:
    """The text of docs/files.md."""
    return f"# The files\nWritten by `python docs/tree.py`.\n```\n{tree()}\n```\n"


if __name__ == "__main__":
    (ROOT / "docs" / "files.md").write_text(page())
