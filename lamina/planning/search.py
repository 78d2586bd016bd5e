"""The largest number that fits a budget, found by asking as seldom as possible."""

from __future__ import annotations

from collections.abc import Callable

FACTOR = 32  # how much further to look while it fits


def largest(total: Callable[[int], int], budget: int, limit: int | None = None) -> int:
    """The largest n, up to `limit`, with total(n) <= budget; 0 where there is none. `total` must never fall.

    Totals are nearly straight lines, so the next guess is where a line through both ends meets the budget. An end that
    stays where it is counts half with every guess, so that no end stays for long (the Illinois method).

    >>> largest(lambda n: 100 + 7 * n, 1000)
    128
    """
    low, under = 1, float(budget - total(1))  # how much is left at `low`, and lacks at `high`
    if under < 0:
        return 0
    while True:
        high = FACTOR * low if limit is None else min(FACTOR * low, limit)
        if high == low:
            return low
        over = float(total(high) - budget)
        if over > 0:
            break
        low, under = high, -over
    moved = 0
    while high - low > 1:
        guess = low + int((high - low) * (under / (under + over)))
        middle = min(max(guess, low + 1), high - 1)
        left = budget - total(middle)
        if left >= 0:
            low, under, over = middle, float(left), over / 2 if moved == 1 else over
            moved = 1
        else:
            high, over, under = middle, float(-left), under / 2 if moved == -1 else under
            moved = -1
    return low
