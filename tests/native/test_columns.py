"""The tables through which native kernels find a cache have the columns that the host writes."""

from __future__ import annotations

import re

from lamina.kernels.columns import ENTRY, HEADER, WIDTH
from lamina.native.build import SOURCES

NAMES = {"k": "K_STORE", "v": "V_STORE", "base": "BASE_STATE", "log.0": "LOGS"}


def enum(file: str, name: str) -> list[str]:
    found = re.search(rf"enum {name} \{{(.*?)\}};", (SOURCES / file).read_text(), re.DOTALL)
    assert found is not None
    return [one.strip() for one in found[1].split(",")]


def test_the_columns_of_an_entry_are_those_of_the_host() -> None:
    named = [NAMES.get(name, name.replace(".", "_").upper()) for name in ENTRY]
    logs = named.index("LOGS")
    assert enum("entry.h", "Column") == named[: logs + 1] and len(named) == logs + 5
    assert f"constexpr int COLUMNS = {WIDTH};" in (SOURCES / "entry.h").read_text()
    assert "constexpr int MOST_INPUTS = 5;" in (SOURCES / "recurrent.h").read_text()


def test_the_columns_of_a_header_are_those_of_the_host() -> None:
    assert enum("ends.h", "HeaderColumn") == [f"H_{name.upper()}" for name in HEADER]
