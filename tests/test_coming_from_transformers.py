"""docs/coming-from-transformers.md: nothing of transformers is left out, every Lamina name on it exists."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import GenerationConfig, GenerationMixin, cache_utils, masking_utils
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

import lamina
from docs import transformers_findings
from lamina.attention.view import View
from lamina.cache.memory import Memory
from lamina.generation.settings.options import CallOptions
from lamina.generation.settings.validate import NEEDLESS, UNSUPPORTED
from lamina.models import known_types
from lamina.sampling.setting import by_name

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coming-from-transformers.md"
OWNERS: dict[str, Any] = {
    "lamina": lamina, "cache": lamina.Cache, "model": lamina.Model, "result": lamina.Result, "memory": Memory,
    "view": View,
}  # fmt: skip


def sections() -> dict[str, list[list[str]]]:
    """By heading: the cells of each line of its tables, without the heads."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|") and not line.startswith("|---"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split(" | ")])
    return {heading: rows[1:] for heading, rows in found.items()}


def names(heading: str) -> set[str]:
    """The names in the first column of a table."""
    return {name for row in sections()[heading] for name in re.findall(r"`(\w+)`", row[0])}


def public_classes() -> list[type]:
    return [
        one for one in vars(cache_utils).values() if inspect.isclass(one) and one.__module__ == cache_utils.__name__
    ]


def public_methods() -> set[str]:
    return {
        name
        for one in public_classes()
        for name, value in vars(one).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def generate_arguments() -> set[str]:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    return fields | (set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"})


def mask_functions() -> set[str]:
    return {
        name
        for name, value in vars(masking_utils).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == masking_utils.__name__
    }


@pytest.mark.parametrize(
    "heading, wanted",
    [
        ("Cache classes", {one.__name__ for one in public_classes()}),
        ("cache_implementation", {*ALL_CACHE_IMPLEMENTATIONS, "paged"}),
        ("Cache methods", public_methods()),
        ("Arguments of generate", generate_arguments()),
        ("Masks", mask_functions()),
    ],
)
def test_every_name_of_transformers_is_on_the_page(heading: str, wanted: set[str]) -> None:
    assert len(wanted) > 8
    assert wanted - names(heading) == set(), f"not on the page, under {heading}"


def test_no_cache_method_or_mask_function_of_the_page_is_gone() -> None:
    known = public_methods() | mask_functions() | {one.__name__ for one in public_classes()} | vars(cache_utils).keys()
    known |= {"AttentionInterface", "PagedAttentionCache"}
    for heading in ("Cache classes", "Cache methods", "Masks"):
        assert names(heading) - known == set()


def test_what_is_called_the_same_is_a_setting_and_what_is_not_is_answered() -> None:
    known = {*by_name(), *CallOptions.__annotations__}
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    for row in sections()["Arguments of generate"]:
        for name in re.findall(r"`(\w+)`", row[0]):
            if row[1] == "same":
                assert name in known, f"{name} is not an argument of generate"
            elif name in fields:
                silent = {"is_assistant", "transformers_version"}
                assert name in {*UNSUPPORTED, *NEEDLESS, *silent}, f"{name} is not answered"
                assert name not in by_name(), f"{name} is a setting of the same name"


def spoken() -> set[str]:
    """What stands in backticks in the Lamina columns, and in the text."""
    found: set[str] = set()
    for line in PAGE.read_text().splitlines():
        cells = line.strip("|").split(" | ")
        found |= set(re.findall(r"`([^`]+)`", " ".join(cells[1:]) if line.startswith("|") else line))
    return found


def test_every_lamina_name_of_the_page_exists() -> None:
    checked = 0
    for code in spoken():
        for owner, path in re.findall(r"\b(lamina|cache|model|result|memory|view)\.([a-zA-Z_]\w*(?:\.\w+)*)", code):
            if "/" in code:
                continue
            found = OWNERS[owner]
            for name in path.split("."):
                fields = getattr(found, "__dataclass_fields__", {})
                annotated = [
                    note for one in getattr(found, "__mro__", ()) for note in vars(one).get("__annotations__", {})
                ]
                if name in fields or (name in annotated and not hasattr(found, name)):
                    found = None
                    break
                assert hasattr(found, name), f"`{code}`: there is no {owner}.{path}"
                found = getattr(found, name)
            checked += 1
    assert checked > 60


@pytest.mark.parametrize(
    "call, known",
    [
        ("model.generate", {*by_name(), *CallOptions.__annotations__, "stream"}),
        ("model.new_cache", set(inspect.signature(lamina.Model.new_cache).parameters)),
        ("model", set(inspect.signature(lamina.Model.__call__).parameters)),
    ],
)
def test_every_argument_of_a_call_on_the_page_exists(call: str, known: set[str]) -> None:
    given = re.findall(rf"`{re.escape(call)}\(([^`]*)\)`", PAGE.read_text())
    arguments = {name for text in given for name in re.findall(r"(\w+)=", re.sub(r"\w+\([^)]*\)", "", text))}
    assert arguments and arguments <= known, arguments - known


def test_paths_of_tests_on_the_page_have_the_tests_that_are_named() -> None:
    """`tests/x/test_y.py::part_of_a_name`"""
    for path, part in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text()):
        assert re.search(rf"def test_\w*{part}", (ROOT / path).read_text()), f"{path} has no test {part}"


def test_families_are_there_unless_the_page_says_otherwise() -> None:
    known = {kind.replace("-", "_") for kind in known_types()}
    checked = 0
    for row in sections()["Five changes of transformers, line by line"]:
        if len(row) < 3 or "families:" not in row[1]:
            continue
        said, answer = row[1:]
        named = set(re.findall(r"`(\w+)`", said.partition("families:")[2]))
        missing = set(re.findall(r"`(\w+)`", answer.partition("not there:")[2]))
        assert named and missing <= named and named - known == missing, said[:60]
        checked += len(named)
    assert checked > 180


def test_the_page_of_findings_is_written_from_what_was_found() -> None:
    assert transformers_findings.PAGE.read_text() == transformers_findings.page(), (
        "run `python -m docs.transformers_findings`"
    )
    results = json.loads(transformers_findings.FOUND.read_text())
    assert len(results) > 190 and sum("skipped" in result for result in results.values()) < 25


def test_the_page_is_about_the_installed_version() -> None:
    assert f"transformers {transformers.__version__}" in PAGE.read_text()
