"""When a row ends, and why: an id that ends texts, its greatest length, the model's context, the clock, a stop string,
the caller's word.

Everything happens on the host, one new token of a row at a time. Where only ids and lengths end a row (`on_device`), a
captured step can decide by itself and this is not needed. Stop strings are looked for in the new text, special tokens
spelt out, wherever the tokens are cut; the tokens of a stop string stay in the row, `cut` says where in the text it
begins and `before` how many tokens end before it.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import TextStream, Tokenizer
    from lamina.generation.settings.settings import Settings

Reason = Literal["eos", "stop", "length", "context", "time", "pages", "capacity"]
"""Why a row ended. "pages" and "capacity": there was no room for more, and the call raised an error
(out_of_room.py)."""
Stop = Callable[[int, list[int], str], bool]


class Stopping:
    """Decides after each new token whether its row ends.

    most          how many new tokens each row may get
    ends          why each row ends that got as many: "length" (the default) or "context"
    eos           ids that end a row
    max_time      seconds from now after which every row ends with its next token
    stop_strings  texts that end a row
    stop          functions called as stop(row, new tokens, new text), the text in whole characters

    >>> stopping = Stopping([3, 3], eos=[2])
    >>> [stopping.put(0, 7), stopping.put(0, 2), stopping.put(1, 7), stopping.put(1, 8), stopping.put(1, 9)]
    [None, 'eos', None, None, 'length']
    """

    def __init__(
        self,
        most: Sequence[int],
        eos: Iterable[int] = (),
        *,
        ends: Sequence[Reason] | None = None,
        max_time: float | None = None,
        stop_strings: Sequence[str] = (),
        stop: Sequence[Stop] = (),
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if stop_strings and tokenizer is None:
            raise InputError("stop strings need a tokenizer, and this checkpoint has none: end rows by eos_token_id")
        self.eos, self.stop_strings, self.stop = frozenset(eos), tuple(stop_strings), tuple(stop)
        self.clock, self.deadline = clock, None if max_time is None else clock() + max_time
        reads = bool(stop_strings or stop)
        whys: Sequence[Reason] = ends or ["length"] * len(most)
        self.rows = [
            State(limit, tokenizer if reads else None, bool(stop_strings), why)
            for limit, why in zip(most, whys, strict=True)
        ]

    @classmethod
    def of(
        cls,
        settings: Settings,
        prompts: Sequence[int],
        tokenizer: Tokenizer | None,
        left: Sequence[int] | None = None,
    ) -> Stopping:
        """As the settings say, for rows with prompts of so many tokens. left: for how many more tokens of each row the
        model has positions; None: without end"""
        most = [settings.most_new(prompt) for prompt in prompts]
        room = most if left is None else left
        return cls(
            [min(both) for both in zip(most, room, strict=True)], settings.eos_token_id,
            ends=["context" if more < asked else "length" for asked, more in zip(most, room, strict=True)],
            max_time=settings.max_time, stop_strings=settings.stop_strings, stop=settings.stop, tokenizer=tokenizer,
        )  # fmt: skip

    @property
    def on_device(self) -> bool:
        """Whether ids and lengths alone end rows."""
        return self.deadline is None and not self.stop_strings and not self.stop

    @property
    def most(self) -> list[int]:
        """How many new tokens each row may get."""
        return [row.most for row in self.rows]

    @property
    def reasons(self) -> list[Reason | None]:
        """Why each row ended; None where it goes on."""
        return [row.reason for row in self.rows]

    @property
    def cuts(self) -> list[int | None]:
        """Where in each row's new text (special tokens left out) the stop string begins that ended it."""
        return [row.cut for row in self.rows]

    @property
    def before(self) -> list[int | None]:
        """How many of each row's new tokens end before the stop string that ended it."""
        return [row.before for row in self.rows]

    def put(self, row: int, token: int) -> Reason | None:
        """Takes a row's next token; why the row ends with it, or None."""
        state = self.rows[row]
        if state.reason is not None:
            raise InputError(f"row {row} ended before ({state.reason}); it takes no more tokens")
        state.put(token)
        if token in self.eos:
            state.reason = "eos"
        elif state.found(self.stop_strings) or any(stop(row, state.tokens, state.text) for stop in self.stop):
            state.reason = "stop"
        elif len(state.tokens) >= state.most:
            state.reason = state.end
        elif self.deadline is not None and self.clock() >= self.deadline:
            state.reason = "time"
        return state.reason

    def branch(self, row: int, before: State, token: int) -> tuple[State, Reason | None]:
        """The same for a row that stands as `before`, which stays as it is: beams try many tokens after one another's.
        -> how the row stands then, and why it ends"""
        self.rows[row] = before.fork()
        return self.rows[row], self.put(row, token)

    def select(self, rows: Sequence[int]) -> Stopping:
        """The given rows as they stand, in that order; a row may be named more than once."""
        new = object.__new__(Stopping)
        new.__dict__.update(self.__dict__)
        new.rows = [self.rows[row].fork() for row in rows]
        return new


class State:
    """One row's new tokens and, where someone reads it, their text."""

    def __init__(self, most: int, tokenizer: Tokenizer | None, spelt: bool, end: Reason = "length") -> None:
        self.most, self.end = most, end
        self.tokens: list[int] = []
        self.reason: Reason | None = None
        self.cut: int | None = None
        self.before: int | None = None
        self.text = ""  # special tokens left out, whole characters
        self._shown: TextStream | None = tokenizer.stream() if tokenizer is not None else None
        # The same with special tokens spelt out, in which stop strings are looked for.
        self._spelt: TextStream | None = (
            tokenizer.stream(skip_special=False) if tokenizer is not None and spelt else None
        )
        self._raw = ""
        self._ends: list[tuple[int, int]] = []  # after each token, the lengths of `_raw` and of `text`

    def put(self, token: int) -> None:
        self.tokens.append(token)
        if self._shown is not None:
            self.text += self._shown.put(token)
        if self._spelt is not None:
            self._raw += self._spelt.put(token)
            self._ends.append((len(self._raw), len(self.text)))

    def found(self, strings: Sequence[str]) -> bool:
        """Whether one of them is there now; earlier tokens had none of them."""
        if self._spelt is None:
            return False
        before = self._ends[-2][0] if len(self._ends) > 1 else 0
        from_here = max(0, before - max(map(len, strings)) + 1)
        seen = self._raw[from_here:] + self._spelt.held
        places = [place for one in strings if (place := seen.find(one)) >= 0]
        if not places:
            return False
        place = from_here + min(places)
        self.cut, self.before = self._in_text(place), self._tokens_before(place)
        return True

    def _tokens_before(self, place: int) -> int:
        """How many tokens end at this place of `_raw` or before it. A token that spans it does not, and neither does
        one that holds the first bytes of a character after it."""
        ends = [raw for raw, _ in self._ends]
        shown = ends[bisect_right(ends, place) - 1] if ends and ends[0] <= place else 0
        return bisect_left(ends, shown) + 1 if shown else 0

    def _in_text(self, place: int) -> int:
        """Where in `text` this place of `_raw` is; for a place inside a special token, where that would be."""
        token = bisect_right(self._ends, place, key=lambda ends: ends[0])
        raw, shown = self._ends[token - 1] if token else (0, 0)
        whole = self._ends[token][1] if token < len(self._ends) else shown + place - raw
        return min(shown + place - raw, whole)

    def shorten(self, tokens: int) -> None:
        """Drops the tokens past the first so many: they could not be fed, so the row did not end with them."""
        del self.tokens[tokens:]
        self.reason = self.cut = self.before = None

    def fork(self) -> State:
        new = object.__new__(State)
        new.__dict__.update(self.__dict__)
        new.tokens, new._ends = list(self.tokens), list(self._ends)
        new._shown = None if self._shown is None else self._shown.fork()
        new._spelt = None if self._spelt is None else self._spelt.fork()
        return new
