"""How much room `generate` makes in a cache before its first token.

The prompt and `SOON` new tokens at first, whatever `max_new_tokens` says: a row may end long before. When that is full
the cache doubles, as every growing cache does, but not beyond the prompt and `max_new_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamina.cache.cache import Cache

SOON = 512


def soon(length: int, most: int) -> int:
    """Tokens that room is made for at first, for a row of `length` tokens that may get `most` new ones.

    >>> soon(100, 20), soon(100, 2_000_000)
    (120, 612)
    """
    return length + min(most, SOON)


def make_room(cache: Cache, lengths: Sequence[int], most: Sequence[int]) -> None:
    """Room for rows that hold so many tokens after their prompts and may get so many new ones. Raises CapacityError
    where they could never fit."""
    both = list(zip(lengths, most, strict=True))
    cache.reserve(max(soon(*one) for one in both), most=max(length + new for length, new in both))
