"""The README and docs/ are true: generated tables, commands, paths and names, and the programs that they show."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import lamina
from docs import families, tree

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


ELSEWHERE = {"config.json", "generation_config.json", "manifest.json", "tokenizer.json", "tensors.txt"}
"""Files of checkpoints and of exported archives."""


def test_the_file_tree_is_that_of_the_files() -> None:
    assert (ROOT / "docs" / "files.md").read_text() == tree.page(), "run `python docs/tree.py`"


def test_the_families_of_the_readme_and_of_their_page_are_those_of_the_package() -> None:
    assert README.read_text() == families.readme(), "run `python -m docs.families`"
    lines = [
        tuple(line.strip("| \n").split(" | "))[:3] for line in families.PAGE.read_text().splitlines() if "| `" in line
    ]
    assert lines[1:] == [one.cells for one in families.entries(captured=False)], "run `python -m docs.families`"


def test_errors_are_rounded_up_to_one_digit() -> None:
    for error, shown in ((3.1e-7, 5e-7), (1e-6, 1e-6), (1.2e-6, 2e-6), (7e-5, 1e-4), (0.0, 1e-8)):
        assert families.round_up(error) == shown


def test_shares_of_the_decode_limit_are_read_from_reports_as_from_their_json() -> None:
    reports = sorted((ROOT / "bench" / "results").glob("*h200*.md"))
    read = {file: families.run_of_markdown(file) for file in reports}
    both = [(file, run) for file, run in read.items() if run and file.with_suffix(".json").exists()]
    assert len(both) > 15
    for file, run in both:
        exact = families.run_of_json(file)
        assert exact is not None and exact.model_type == run.model_type and exact.shape == run.shape
        assert run.contexts == pytest.approx(exact.contexts, abs=6e-4)  # tenths of a percent
    assert "(qwen3-8b, context 1,024)" in families.shares()["qwen3"]


def test_make_has_the_commands_it_names() -> None:
    targets = (ROOT / "Makefile").read_text()
    named = [name for page in PAGES for name in re.findall(r"^make ([\w-]+)|`make ([\w-]+)", page.read_text(), re.M)]
    assert len(named) > 4
    for name in {a or b for a, b in named}:
        assert f"\n{name}:" in targets


@pytest.fixture(scope="module")
def files() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\n")) - {""}


def test_the_root_holds_no_file_that_an_example_wrote(files: set[str]) -> None:
    known = {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml"}
    assert {file for file in files if "/" not in file and not file.startswith(".")} == known


@every_page
def test_every_path_that_a_page_names_exists(page: Path, files: set[str]) -> None:
    """In backticks: from the root, from lamina/ or from the page's folder, or the last part of a path."""
    text = page.read_text() if page.name != "files.md" else ""
    named = re.findall(r"`([\w.\-]+(?:/[\w.\-]+)*\.(?:py|md|txt|json|toml)|(?:[\w\-]+/)+[\w\-]*)`", text)
    named += re.findall(r"(?<= )((?:[\w\-]+/)+[\w\-]+\.py)", text)
    for name in named:
        ends = [f"/{file}" for file in files if f"/{name}" in f"/{file}"]
        assert ends or name in ELSEWHERE, f"{page.name} names {name}"
    for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


@every_page
def test_every_module_and_public_name_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"python -m ([\w.]+\w)", text):
        assert find_spec(module) is not None, f"{page.name} names {module}"
    for name in set(re.findall(r"\blamina\.([A-Za-z]\w*)", text)):
        assert name in lamina.__all__ or find_spec(f"lamina.{name}") is not None, f"{page.name} names lamina.{name}"


def test_the_files_that_make_check_runs_exist() -> None:
    root = README.parent
    named = set(re.findall(r"test_\w+\.py", (root / "Makefile").read_text()))
    assert named and named <= {file.name for file in (root / "tests").rglob("test_*.py")}
