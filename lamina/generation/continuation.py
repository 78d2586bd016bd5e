"""Continuing a cache with whole sequences: what it already holds is not fed again.

Each row is taken back, exactly, to where the wanted sequence leaves what it holds. Where a row cannot go back that far,
that row alone starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamina.cache.cache import Cache
from lamina.errors import InputError


def continue_from(cache: Cache, rows: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Brings each row of the cache to a prefix of its wanted sequence; -> how many tokens of it are reused, and those
    that are still to be fed.

    Nothing is left to feed where the cache holds exactly the sequence and the logits after it; otherwise at least the
    last token is. A row that starts anew has lost an attached source too.

    >>> cache = model.new_cache()                                      # doctest: +SKIP
    >>> model([[5, 6, 7, 8]], cache=cache)                             # doctest: +SKIP
    >>> continue_from(cache, [[5, 6, 9]])                              # doctest: +SKIP
    ([2], [[9]])
    """
    if len(rows) != cache.rows:
        raise InputError(f"{len(rows)} prompts were given, the cache has {cache.rows} rows")
    possible = cache.rewindable.tolist()
    known = [False] * cache.rows if cache.logits is None else (~cache.logits[:, 0].isnan()).tolist()
    reused, back, anew = [], [0] * cache.rows, []
    for row, (ids, held) in enumerate(zip(rows, cache.tokens, strict=True)):
        if not ids:
            raise InputError(f"prompt {row} is empty: give at least one token")
        keep = common(ids, held)
        if keep == len(ids) and not (keep == len(held) and known[row]):
            keep -= 1  # its logits are made again
        if len(held) - keep <= possible[row]:
            back[row] = len(held) - keep
        else:
            anew.append(row)
            keep = 0
        reused.append(keep)
    if any(back):
        cache.rewind(back)
    if anew:
        cache.reset(anew)
    return reused, [list(ids[keep:]) for ids, keep in zip(rows, reused, strict=True)]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common.

    >>> common([5, 6, 7], [5, 6, 8, 9])
    2
    """
    return next((n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
