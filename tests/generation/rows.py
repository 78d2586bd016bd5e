"""Ragged rows of every family, and caches that hold them, for tests about continuing."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from lamina.cache import Cache
from lamina.generation import Result
from lamina.model import Model
from tests.families.cases import FIRST
from tests.families.harness import pair

FAMILIES = [family for family, _ in FIRST]
PROMPTS = [[5, 9, 12, 3, 44, 8, 21, 2, 2, 6, 13], [7], [30, 31, 32]]
MORE = [[1, 2, 3], [40], [4, 41, 42, 43, 17, 11, 10]]
NEW = 4
every_family = pytest.mark.parametrize("family", FAMILIES)


def model_of(family: str) -> Model:
    return pair(family, dict(FIRST)[family])[1]


def made(model: Model, prompts: Any, new: int = NEW, **settings: Any) -> Result:
    return model.generate(prompts, new, **dict(eos_token_id=()) | settings)


def scratch(model: Model, rows: list[list[int]], new: int = NEW, **settings: Any) -> list[list[int]]:
    """One run without a cache to start from."""
    return _scratch(model, tuple(map(tuple, rows)), new, tuple(settings.items()))


@functools.cache
def _scratch(model: Model, rows: Any, new: int, settings: Any) -> list[list[int]]:
    return made(model, [list(row) for row in rows], new, **dict(settings)).tokens


def held(family: str, slack: int = 0) -> Cache:
    """A cache that holds the prompts and new tokens, for the taking."""
    return _held(family, slack).fork()


@functools.cache
def _held(family: str, slack: int) -> Cache:
    model = model_of(family)
    return made(model, PROMPTS, cache=model.new_cache(len(PROMPTS), slack=slack)).cache


def added(rows: list[list[int]], more: list[list[int]]) -> list[list[int]]:
    return [row + new for row, new in zip(rows, more, strict=True)]
