"""Sizes as people write them: 24GiB, 80 GB, 4.3TB/s."""

from __future__ import annotations

import re

from lamina.errors import InputError

UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(given: int | float | str, what: str = "memory") -> int:
    """Bytes.

    >>> parse_size("24GiB"), parse_size("1.5 kB"), parse_size(7)
    (25769803776, 1500, 7)
    """
    return int(_parsed(given, what, "24GiB or 80GB"))


def parse_rate(given: int | float | str, what: str = "bandwidth") -> float:
    """Bytes a second.

    >>> parse_rate("4.3TB/s") == parse_rate(4.3e12)
    True
    """
    text = given.strip().removesuffix("/s") if isinstance(given, str) else given
    return _parsed(text, what, "4.3TB/s", given)


def _parsed(given: int | float | str, what: str, example: str, shown: object = None) -> float:
    shown = given if shown is None else shown
    if isinstance(given, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", given.lower())
        if found is None or found[2] not in UNITS:
            raise InputError(
                f"{what} {shown!r} is not a size: give a number and B, kB, MB, GB, TB (thousands) or KiB, MiB, GiB, "
                f"TiB (1024), such as {example}"
            )
        given = float(found[1]) * UNITS[found[2]]
    if not given >= 1:
        raise InputError(f"{what} {shown!r} must be at least one byte, such as {example}")
    return given
