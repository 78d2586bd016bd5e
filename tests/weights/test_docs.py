"""The table of docs/weights.md has every format with the bits that it takes."""

from __future__ import annotations

import re
from pathlib import Path

from lamina.weights import FORMATS, writable

TEXT = (Path(__file__).parent.parent.parent / "docs" / "weights.md").read_text()


def test_the_table_lists_every_format_and_its_bits():
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| (\d+) \| ([^|]+) \| ([^|]+) \|", TEXT, re.M)
    assert {name for name, *_ in rows} == set(FORMATS)
    for name, bits, group, _, written in rows:
        format, width = FORMATS[name], 1 << 20
        assert float(bits) == round(format.bytes_of(1, width) * 8 / width, 4), name
        assert int(group) == format.group and (name in writable()) == ("lamina quantize" in written), name
