"""How prompts continue a cache: a prompt is either the text that follows a row, or a whole sequence of which the row
already holds a part.

For a whole sequence, the row is rewound to the first token that differs, and the rest is fed. A row that cannot be
rewound that far (a window or a recurrent state without slack) is reset and fed whole; other rows are not affected.
`continuation` computes the plan and changes nothing; `Continuation.apply` changes the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.cache.cache import Cache
from lamina.errors import InputError


@dataclass(frozen=True)
class Continuation:
    """The plan that takes each row of a cache to its prompt.

    back      tokens to rewind, per row
    restart   rows to reset
    rest      ids to feed after that, per row; empty if the logits after the row's last token are known
    reused    tokens of each prompt that need not be fed
    """

    back: list[int]
    restart: list[int]
    rest: list[list[int]]
    reused: list[int]

    @classmethod
    def of_new(cls, rows: Sequence[list[int]]) -> Continuation:
        """The plan for an empty cache."""
        return cls.after(rows, [0] * len(rows))

    @classmethod
    def after(cls, rows: Sequence[list[int]], held: Sequence[int]) -> Continuation:
        """The plan for a cache that holds the first `held[row]` tokens of each prompt, and nothing else."""
        return cls([0] * len(rows), [], [row[n:] for row, n in zip(rows, held, strict=True)], list(held))

    def lengths(self, held: Sequence[int]) -> list[int]:
        """Tokens that each row will hold after the plan. held: tokens that it holds now"""
        return [len(self.rest[row]) + (0 if row in self.restart else n - self.back[row]) for row, n in enumerate(held)]

    def texts(self, held: Sequence[Sequence[int]]) -> list[list[int]]:
        """Ids of each row after the plan. held: those that it holds now"""
        return [
            [*(() if row in self.restart else ids[: len(ids) - self.back[row]]), *self.rest[row]]
            for row, ids in enumerate(held)
        ]

    def apply(self, cache: Cache) -> None:
        """Rewinds and resets rows, so that `rest` can be fed. A reset also drops the row's attached source."""
        if any(self.back):
            cache.rewind(self.back)
        if self.restart:
            cache.reset(self.restart)


def whole_rows(held: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], whole: bool | None) -> list[bool]:
    """For each row, whether its prompt is the whole sequence (True) or the text that follows the row (False).

    whole   the caller's choice for all rows. None: a prompt is the whole sequence only if the row's tokens are a strict
            prefix of it, so no token of a row is ever dropped

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
    """The plan that takes the rows of a cache to these prompts. An empty prompt continues the row as it is.

    whole   whether a prompt is the whole sequence or the text that follows: one value for all rows, or one per row.
            None: as `whole_rows` decides

    >>> cache = model.new_cache()                                      # doctest: +SKIP
    >>> model([[5, 6, 7, 8]], cache=cache)                             # doctest: +SKIP
    >>> continuation(cache, [[5, 6, 9]], whole=True)                   # doctest: +SKIP
    Continuation(back=[2], restart=[], rest=[[9]], reused=[2])
    >>> continuation(cache, [[5, 6, 9]])                               # doctest: +SKIP
    Continuation(back=[0], restart=[], rest=[[5, 6, 9]], reused=[0])
    """
    possible, tokens = cache.rewindable.tolist(), cache.tokens
    known = [False] * cache.rows if cache.logits is None else (~cache.logits[:, 0].isnan()).tolist()
    chosen = whole_rows(tokens, prompts, whole) if whole is None or isinstance(whole, bool) else whole
    back, restart, rest, reused = [0] * cache.rows, [], [], []
    for row, (prompt, held, is_whole) in enumerate(zip(prompts, tokens, chosen, strict=True)):
        if not prompt and not held:
            raise InputError(f"prompt {row} is empty, and so is its row of the cache: give at least one token")
        is_whole = is_whole and bool(prompt)
        wanted = list(prompt) if is_whole else [*held, *prompt]
        keep = common(wanted, held)
        if keep == len(wanted) and not (keep == len(held) and known[row]):
            keep -= 1  # the last token is fed again, for its logits
        if len(held) - keep <= possible[row]:
            back[row] = len(held) - keep
        else:
            restart.append(row)
            keep = 0
        if -1 in wanted[keep : len(held)]:
            raise InputError(
                f"row {row} cannot be rewound to recompute the logits after its last token, and holds embeddings, "
                "which cannot be fed again: give at least one new token"
            )
        rest.append(wanted[keep:])
        reused.append(keep if is_whole else 0)
    return Continuation(back, restart, rest, reused)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two id sequences.

    >>> common([5, 6, 7], [5, 6, 8, 9])
    2
    """
    return next((n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
