"""Small random checkpoints: for each family, names of cases and functions that make a transformers config.

A module here defines `FAMILIES`, family -> {case -> function}; or, if it is named after its family, `CASES`. The first
case of a family is its smallest typical one; tests that need one model of each kind take that.

Families in `CORE` are tested with every history of `test_families.py`. They cover every kind of layer. The others are
built from the same blocks, and `test_every_family.py` tests what is their own.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Cases = dict[str, Callable[[], Any]]


def found() -> dict[str, Cases]:
    families: dict[str, Cases] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem != "__init__":
            module = import_module(f"tests.families.cases.{path.stem}")
            families |= {path.stem: module.CASES} if hasattr(module, "CASES") else module.FAMILIES
    return families


CASES = found()
"""Decoder-only families; encoder–decoder ones have tests of their own."""
CORE = ["deepseek_v3", "falcon_h1", "gemma2", "lfm2", "llama", "llama4", "mamba", "mamba2", "qwen3_next"]


def cases(family: str) -> Cases:
    return CASES[family]


FAMILIES = CORE
ALL = [(family, name) for family in CORE for name in cases(family)]
FIRST = [(family, next(iter(cases(family)))) for family in CORE]
OTHERS = [(family, name) for family in CASES if family not in CORE for name in cases(family)]
OTHER_FIRST = [(family, next(iter(cases(family)))) for family in CASES if family not in CORE]
