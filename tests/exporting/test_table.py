"""The table of docs/export.md is what docs/export_families.json says."""

import json

from docs.export_table import FOUND, PAGE, page


def test_the_page_has_the_recorded_results() -> None:
    assert page(json.loads(FOUND.read_text())) == PAGE.read_text()
