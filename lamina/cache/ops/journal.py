"""Changes that are carried out whole, wherever an interrupt (Ctrl-C, out of memory) cuts them.

A verb checks everything first and describes what it will write as a `Change`. The cache notes the change in one
assignment and then runs it. If an exception arrives in between, the note is still there, and whoever uses the cache
next finishes the change before it looks at anything (`Cache.settle`). So a cache is always as it was before a verb,
or as it is after it.

A change is a list of actions. Each is a pair: `compute` reads and changes nothing, `write` stores what was computed and
may be repeated with the same value. What was computed is kept until the write is known to be complete, so an action
that overwrites its own input (folding a state, permuting rows) is still done exactly once.
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
        self._computed: tuple[int, Any] | None = None  # number of the action, and what it is to write

    def write(self, write: Callable[[], object]) -> None:
        """Adds something that may be done more than once with the same outcome."""
        self._actions.append((None, write))

    def add(self, compute: Callable[[], Any], write: Callable[[Any], object]) -> None:
        """Adds a write whose value is computed from what there is by then."""
        self._actions.append((compute, write))

    def finish(self) -> None:
        """Does what is not complete yet."""
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
        self._actions = []  # they refer to the change, and so what they refer to would wait for the garbage collector
