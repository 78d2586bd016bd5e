"""Continuing a cache, with only what comes next or with whole sequences, of which it already holds a part.

For a whole sequence a row is taken back, exactly, to where the sequence leaves what it holds, and the rest is fed.
Where a row cannot go back that far, that row alone starts anew. `continuation` only looks; `begin` changes the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.cache.cache import Cache
from lamina.errors import InputError


@dataclass(frozen=True)
class Continuation:
    """How each row of a cache gets to its prompt.

    back     tokens that it is taken back by
    anew     rows that start from nothing
    rest     tokens that are then fed; none where the logits after the last one are known
    reused   tokens of the prompt that need not be fed
    """

    back: list[int]
    anew: list[int]
    rest: list[list[int]]
    reused: list[int]

    @classmethod
    def of_new(cls, rows: Sequence[list[int]]) -> Continuation:
        """For a cache that holds nothing yet."""
        return cls.after(rows, [0] * len(rows))

    @classmethod
    def after(cls, rows: Sequence[list[int]], held: Sequence[int]) -> Continuation:
        """For a cache that holds just the first so many tokens of each."""
        return cls([0] * len(rows), [], [row[n:] for row, n in zip(rows, held, strict=True)], list(held))

    def lengths(self, held: Sequence[int]) -> list[int]:
        """How many tokens each row will hold, where it holds so many now."""
        return [len(self.rest[row]) + (0 if row in self.anew else n - self.back[row]) for row, n in enumerate(held)]

    def begin(self, cache: Cache) -> None:
        """Takes the rows to where `rest` goes on. A row that starts anew loses an attached source too."""
        if any(self.back):
            cache.rewind(self.back)
        if self.anew:
            cache.reset(self.anew)


def whole_rows(held: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], whole: bool | None) -> list[bool]:
    """For each row, whether its prompt is the whole sequence (True) or only what comes next (False).

    whole   the caller's word for all rows. None: a prompt is the whole sequence only where what the row holds is a
            strict prefix of it, so nothing that a row holds is ever dropped

    >>> whole_rows([[5, 6], [5, 6], [5, 6]], [[5, 6, 7], [5, 6], [5, 9, 7]], None)
    [True, False, False]
    """
    if whole is not None:
        return [whole] * len(prompts)
    return [
        0 < len(row) < len(prompt) and common(prompt, row) == len(row)
        for row, prompt in zip(held, prompts, strict=True)
    ]


def continuation(
    cache: Cache, prompts: Sequence[Sequence[int]], whole: bool | Sequence[bool] | None = None
) -> Continuation:
    """How the rows of a cache are continued by prompts.

    whole   whether prompts are whole sequences or only what comes next, one for all or one for each row. None: as
            `whole_rows` finds

    An empty prompt goes on from where the row is.

    >>> cache = model.new_cache()                                      # doctest: +SKIP
    >>> model([[5, 6, 7, 8]], cache=cache)                             # doctest: +SKIP
    >>> continuation(cache, [[5, 6, 9]], whole=True)                   # doctest: +SKIP
    Continuation(back=[2], anew=[], rest=[[9]], reused=[2])
    >>> continuation(cache, [[5, 6, 9]])                               # doctest: +SKIP
    Continuation(back=[0], anew=[], rest=[[5, 6, 9]], reused=[0])
    """
    possible, tokens = cache.rewindable.tolist(), cache.tokens
    known = [False] * cache.rows if cache.logits is None else (~cache.logits[:, 0].isnan()).tolist()
    chosen = whole_rows(tokens, prompts, whole) if whole is None or isinstance(whole, bool) else whole
    back, anew, rest, reused = [0] * cache.rows, [], [], []
    for row, (prompt, held, is_whole) in enumerate(zip(prompts, tokens, chosen, strict=True)):
        if not prompt and not held:
            raise InputError(f"prompt {row} is empty, and so is its row of the cache: give at least one token")
        is_whole = is_whole and bool(prompt)
        wanted = list(prompt) if is_whole else [*held, *prompt]
        keep = common(wanted, held)
        if keep == len(wanted) and not (keep == len(held) and known[row]):
            keep -= 1  # its logits are made again
        if len(held) - keep <= possible[row]:
            back[row] = len(held) - keep
        else:
            anew.append(row)
            keep = 0
        if -1 in wanted[keep : len(held)]:
            raise InputError(
                f"row {row} cannot go back to where the logits after its last token can be made again, and was fed "
                "embeddings, which cannot be fed anew: give at least one new token"
            )
        rest.append(wanted[keep:])
        reused.append(keep if is_whole else 0)
    return Continuation(back, anew, rest, reused)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common.

    >>> common([5, 6, 7], [5, 6, 8, 9])
    2
    """
    return next((n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
