"""Small random checkpoints, one module a family: CASES maps a name to a function that makes a transformers config.

The first case of a family is its smallest typical one; tests that need one model of each kind take that.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")
"""Decoder-only families; encoder–decoder ones have tests of their own."""


def cases(family: str) -> dict[str, Callable[[], Any]]:
    return import_module(f"tests.families.cases.{family}").CASES


ALL = [(family, name) for family in FAMILIES for name in cases(family)]
FIRST = [(family, next(iter(cases(family)))) for family in FAMILIES]
