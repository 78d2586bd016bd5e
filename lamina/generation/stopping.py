"""`Stopping`: decides on the host, after each new token, whether its row ends, and why.

A row ends by an eos id, its maximum length, the model's context, a time limit, a stop string, or a caller's function.

If only eos ids and lengths can end a row (`on_device`), a captured step decides by itself. Stop strings are searched in
the new text with special tokens spelt out, so they match across token borders. The tokens of a stop string stay in the
row: `stop_char` is the index in the text where it begins, `stop_token` the number of tokens that end before it.
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
"""Why a row ended. "pages" and "capacity": the cache had no room, and the call raised an error (out_of_room.py)."""
Stop = Callable[[int, list[int], str], bool]


class Stopping:
    """Decides after each new token whether its row ends.

    most          new tokens that each row may get
    ends          per row, the reason for ending after `most` tokens: "length" (the default) or "context"
    eos           ids that end a row
    max_time      seconds from now after which every row ends with its next token
    stop_strings  strings that end a row
    stop          functions called as stop(row, new tokens, new text); True ends the row. The text has whole characters

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
        reads_text = bool(stop_strings or stop)
        limit_reasons: Sequence[Reason] = ends or ["length"] * len(most)
        self.rows = [
            RowState(limit, tokenizer if reads_text else None, bool(stop_strings), reason)
            for limit, reason in zip(most, limit_reasons, strict=True)
        ]

    @classmethod
    def of(
        cls,
        settings: Settings,
        prompts: Sequence[int],
        tokenizer: Tokenizer | None,
        left: Sequence[int] | None = None,
    ) -> Stopping:
        """The stopping rules of the settings.

        prompts   tokens that each row holds after its prompt
        left      new tokens of each row that the model has positions for; None: no limit
        """
        most = [settings.most_new(prompt) for prompt in prompts]
        room = most if left is None else left
        return cls(
            [min(both) for both in zip(most, room, strict=True)], settings.eos_token_id,
            ends=["context" if more < asked else "length" for asked, more in zip(most, room, strict=True)],
            max_time=settings.max_time, stop_strings=settings.stop_strings, stop=settings.stop, tokenizer=tokenizer,
        )  # fmt: skip

    @property
    def on_device(self) -> bool:
        """Whether only eos ids and lengths can end rows, which a captured step checks on the device."""
        return self.deadline is None and not self.stop_strings and not self.stop

    @property
    def most(self) -> list[int]:
        """New tokens that each row may get."""
        return [row.most for row in self.rows]

    @property
    def reasons(self) -> list[Reason | None]:
        """Why each row ended; None for a row that goes on."""
        return [row.reason for row in self.rows]

    @property
    def stop_chars(self) -> list[int | None]:
        """Index in each row's new text (without special tokens) of the stop string that ended it."""
        return [row.stop_char for row in self.rows]

    @property
    def stop_tokens(self) -> list[int | None]:
        """New tokens of each row that end before the stop string that ended it."""
        return [row.stop_token for row in self.rows]

    def put(self, row: int, token: int) -> Reason | None:
        """Adds a row's next token. -> why the row ends with it; None if it goes on"""
        state = self.rows[row]
        if state.reason is not None:
            raise InputError(f"row {row} ended before ({state.reason}), so it gets no more tokens")
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

    def branch(self, row: int, before: RowState, token: int) -> tuple[RowState, Reason | None]:
        """`put` for a row whose state is `before`, which is not changed: beam search tries many tokens after the same
        state. -> the new state, and why the row ends"""
        self.rows[row] = before.fork()
        return self.rows[row], self.put(row, token)

    def select(self, rows: Sequence[int]) -> Stopping:
        """A copy with these rows in this order; a row may be named more than once."""
        new = object.__new__(Stopping)
        new.__dict__.update(self.__dict__)
        new.rows = [self.rows[row].fork() for row in rows]
        return new


class RowState:
    """One row's new tokens, and their text if stop strings or stop functions read it.

    most        new tokens that the row may get
    end         the reason for ending after `most` tokens
    tokenizer   decodes the tokens; None if nobody reads the text
    spelt       also decodes with special tokens spelt out, for stop strings
    """

    def __init__(self, most: int, tokenizer: Tokenizer | None, spelt: bool, end: Reason = "length") -> None:
        self.most, self.end = most, end
        self.tokens: list[int] = []
        self.reason: Reason | None = None
        self.stop_char: int | None = None
        self.stop_token: int | None = None
        self.text = ""  # whole characters, without special tokens
        self._shown: TextStream | None = tokenizer.stream() if tokenizer is not None else None
        self._spelt: TextStream | None = (
            tokenizer.stream(skip_special=False) if tokenizer is not None and spelt else None
        )
        self._raw = ""  # whole characters, special tokens spelt out: stop strings are searched here
        self._ends: list[tuple[int, int]] = []  # after each token, the lengths of `_raw` and of `text`

    def put(self, token: int) -> None:
        self.tokens.append(token)
        if self._shown is not None:
            self.text += self._shown.put(token)
        if self._spelt is not None:
            self._raw += self._spelt.put(token)
            self._ends.append((len(self._raw), len(self.text)))

    def found(self, strings: Sequence[str]) -> bool:
        """Whether the newest token completed one of these strings; sets `stop_char` and `stop_token`."""
        if self._spelt is None:
            return False
        before = self._ends[-2][0] if len(self._ends) > 1 else 0
        start = max(0, before - max(map(len, strings)) + 1)  # earlier text had no match
        searched = self._raw[start:] + self._spelt.held
        matches = [index for one in strings if (index := searched.find(one)) >= 0]
        if not matches:
            return False
        index = start + min(matches)
        self.stop_char, self.stop_token = self._in_text(index), self._tokens_before(index)
        return True

    def _tokens_before(self, index: int) -> int:
        """Tokens that end at this index of `_raw` or before it. A token that spans the index is not counted, nor one
        that holds the first bytes of a character after it."""
        ends = [raw for raw, _ in self._ends]
        shown = ends[bisect_right(ends, index) - 1] if ends and ends[0] <= index else 0
        return bisect_left(ends, shown) + 1 if shown else 0

    def _in_text(self, index: int) -> int:
        """The index in `text` of an index in `_raw`. Inside a special token, which `text` leaves out: where it would
        be."""
        token = bisect_right(self._ends, index, key=lambda ends: ends[0])
        raw, shown = self._ends[token - 1] if token else (0, 0)
        whole = self._ends[token][1] if token < len(self._ends) else shown + index - raw
        return min(shown + index - raw, whole)

    def shorten(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens. The others could not be fed, so the row did not end with them."""
        del self.tokens[tokens:]
        self.reason = self.stop_char = self.stop_token = None

    def fork(self) -> RowState:
        """A copy that can get other tokens."""
        new = object.__new__(RowState)
        new.__dict__.update(self.__dict__)
        new.tokens, new._ends = list(self.tokens), list(self._ends)
        new._shown = None if self._shown is None else self._shown.fork()
        new._spelt = None if self._spelt is None else self._spelt.fork()
        return new
