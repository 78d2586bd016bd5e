"""The exceptions among transformers' own tests (bench/bridge/their_tests.py) are on the page that lists them."""

from __future__ import annotations

from pathlib import Path

from bench.bridge.their_tests import table

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-transformers.md"


def test_every_exception_is_on_the_page_with_its_reason() -> None:
    assert table() in PAGE.read_text()
