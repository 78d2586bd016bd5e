"""The tables of docs/export.md are what docs/export_families.json and docs/export_kinds.json say."""

from docs.export_table import FAMILIES, PAGE, page, recorded
from lamina.exporting.export import TARGETS
from tests.exporting.kinds import KINDS


def test_the_page_has_the_recorded_results() -> None:
    assert page() == PAGE.read_text()


def test_results_are_recorded_of_families_kinds_and_targets_that_exist() -> None:
    for name, every in (("families", FAMILIES), ("kinds", KINDS)):
        found = recorded(name)
        assert found.keys() <= every.keys()
        assert {target for results in found.values() for target in results} <= set(TARGETS)
