"""A journal: changes to a cache are carried out as a whole, even if an interrupt (Ctrl-C, out of memory) comes halfway.

A verb checks everything first and describes what it will write as a `Change`. The cache stores the change in one
assignment and then runs it. If an exception comes in between, the change is still stored, and the next use of the cache
finishes it before it reads anything (`Cache.settle`). So a cache is always as before a verb, or as after it.

A change is a list of actions. Each is a pair: `compute` reads and changes nothing, `write` stores the computed value
and is idempotent. The computed value is kept until the write is complete, so the effect of an action that overwrites
its own input (folding a state, permuting rows) is applied exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Action = tuple[Callable[[], Any] | None, Callable[..., object]]


class Change:
    """Actions in order, and how many of them are complete.

    >>> rows, change = [1, 2], Change()
    >>> change.add(lambda: rows[::-1], lambda new: rows.__setitem__(slice(None), new))
    >>> change.finish(); change.finish(); rows
    [2, 1]
    """

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._complete = 0
        self._computed: tuple[int, Any] | None = None  # index of the action in progress, and the value it writes

    def write(self, write: Callable[[], object]) -> None:
        """Adds an idempotent write that computes nothing first."""
        self._actions.append((None, write))

    def add(self, compute: Callable[[], Any], write: Callable[[Any], object]) -> None:
        """Adds a write whose value is computed when its turn comes."""
        self._actions.append((compute, write))

    def finish(self) -> None:
        """Runs the actions that are not complete yet."""
        while self._complete < len(self._actions):
            at = self._complete
            compute, write = self._actions[at]
            if compute is None:
                write()
            else:
                if self._computed is None or self._computed[0] != at:
                    self._computed = at, compute()
                write(self._computed[1])
            self._complete = at + 1
            self._computed = None
        self._actions = []  # breaks their cycle with the change, so that their tensors are freed immediately
