"""Imports inside functions are for what is optional or slow, or would be a cycle, and each says which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lamina

PACKAGE = Path(lamina.__file__).parent
EXPLAINED = {  # a comment at the top is for all of the file
    "runtime/gpu/attend.py",
    "runtime/gpu/backend.py",
    "runtime/gpu/logged.py",
    "runtime/prompts/prebuild.py",
    "runtime/prompts/table_backend.py",
}
LAZY = {"cli"}  # folders in which nothing is imported before it is needed: see their `__init__`


def inside_functions(tree: ast.AST, inside: bool = False) -> Iterator[int]:
    """Lines of the first import of each run of imports of this package inside a function."""
    first = True
    for child in ast.iter_child_nodes(tree):
        is_import = isinstance(child, ast.Import | ast.ImportFrom)
        if inside and first and isinstance(child, ast.ImportFrom) and (child.module or "").startswith("lamina"):
            yield child.lineno
        first = not is_import
        yield from inside_functions(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_import_inside_a_function_has_a_reason() -> None:
    silent = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        if str(path) in EXPLAINED or path.parts[0] in LAZY:
            continue
        lines = file.read_text().splitlines()
        for line in inside_functions(ast.parse(file.read_text())):
            if "#" not in lines[line - 1] and not lines[line - 2].strip().startswith("#"):
                silent.append(f"{path}:{line}: {lines[line - 1].strip()}")
    assert silent == []
