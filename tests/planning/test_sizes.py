from __future__ import annotations

import random

import pytest

from lamina.errors import InputError
from lamina.planning.search import largest
from lamina.planning.sizes import parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 * 2**30), ("80GB", 80 * 10**9), ("1.5 kb", 1500), (" 2 tib ", 2**41), ("7B", 7), (12, 12), (9.7, 9)],
)
def test_sizes_are_read_as_people_write_them(text: str | float, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_rates_are_sizes_a_second() -> None:
    assert parse_rate("4.3TB/s") == parse_rate("4300 GB") == parse_rate(4.3e12) == 4.3e12


@pytest.mark.parametrize("text", ["", "24", "24G", "GiB", "-3GB", "1e9B", "3 GB/h"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a size: give a number and B, kB, .*, such as 24GiB or 80GB"):
        parse_size(text)


@pytest.mark.parametrize("given", [0, "0GB", -5, float("nan")])
def test_nothing_is_not_a_budget(given: float | str) -> None:
    with pytest.raises(InputError, match=f"memory {given!r} must be at least one byte"):
        parse_size(given)
    with pytest.raises(InputError, match=r"such as 4\.3TB/s"):
        parse_rate(given)


def test_the_largest_that_fits_is_found_for_lines_curves_and_stairs() -> None:
    rng = random.Random(0)
    for _ in range(400):
        start, slope, stair = rng.randint(1, 10**6), rng.randint(1, 1000), rng.randint(1, 500)
        total = rng.choice(
            [
                lambda n, a=start, b=slope: a + b * n,
                lambda n, a=start, b=slope: a + b * n * n,
                lambda n, a=start, b=slope, s=stair: a + b * (n // s) * s,
                lambda n, a=start, b=slope: a + b * (1 << (n - 1).bit_length()),
            ]
        )
        budget, limit = rng.randint(1, 10**9), rng.choice([None, None, rng.randint(1, 10**5)])
        found = largest(total, budget, limit)
        assert total(found) <= budget if found else total(1) > budget
        assert found == limit or total(found + 1) > budget


def test_a_line_is_asked_about_a_few_times_only() -> None:
    asked: list[int] = []

    def total(n: int) -> int:
        asked.append(n)
        return 16_000_000_000 + 131_080 * n

    assert largest(total, 24 * 2**30) == (24 * 2**30 - 16_000_000_000) // 131_080
    assert len(asked) < 10
