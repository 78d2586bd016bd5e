"""Streams: the events of a generation that runs in a thread of its own, to be read one by one.

    for event in stream:                 # or: async for event in stream
        print(event.text, end="")
    stream.result                        # what generate would have returned

Nothing runs before the first event is asked for, and never more than `buffer` events ahead of the reader. Leaving the
loop, an error in it, `cancel()` and dropping the stream all end the producer between two of its steps; when the loop is
left or `cancel()` returns, the producer is over, its cache can be used, and events that were not read are gone. When
the interpreter exits, every running producer is cancelled and waited for.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch

from lamina.errors import InputError
from lamina.generation.stopping import Reason

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer

R = TypeVar("R")


@dataclass(frozen=True)
class Event:
    """A new token of a row; `text` is what became whole characters with it, `reason` is why the row ends here."""

    row: int
    token: int
    text: str
    reason: Reason | None = None


class Pieces:
    """Makes events of tokens: the texts of a row's events joined are the text of its tokens, up to the stop string that
    ended it. What may become a stop string is held back until it is known whether it does."""

    def __init__(self, tokenizer: Tokenizer | None, rows: int, stop_strings: Sequence[str] = ()) -> None:
        self._texts = None if tokenizer is None else [tokenizer.stream() for _ in range(rows)]
        self._stop_strings = stop_strings
        self._told, self._waiting = [0] * rows, [""] * rows

    def event(self, row: int, token: int, reason: Reason | None = None, cut: int | None = None) -> Event:
        """cut: where in the row's text the stop string begins that ends it, where that is known."""
        if self._texts is None:
            return Event(row, token, "", reason)
        text = self._texts[row]
        waiting = self._waiting[row] + text.put(token) + ("" if reason is None else text.end())
        if cut is not None:
            sure = min(max(cut - self._told[row], 0), len(waiting))
        else:
            sure = len(waiting) - (0 if reason is not None else begun(waiting, self._stop_strings))
        self._told[row] += sure
        self._waiting[row] = waiting[sure:]
        return Event(row, token, waiting[:sure], reason)


def begun(text: str, strings: Sequence[str]) -> int:
    """How many last letters of a text are the beginning of one of these strings, at most.

    >>> begun("once upon", ["on the"]), begun("once upon", ["one", "upon a"]), begun("once", ["x"])
    (2, 4, 0)
    """
    longest = min(len(text), max((len(one) - 1 for one in strings), default=0))
    return next((n for n in range(longest, 0, -1) if any(one.startswith(text[-n:]) for one in strings)), 0)


class Cancelled(Exception):
    """Raised in a producer when nobody wants its events any more."""


class Emit:
    """What a producer is given: called with each event, it waits while the reader is far behind. `check` is for steps
    that have no event. Both raise `Cancelled` when it is time to clean up and leave."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    def __call__(self, event: Event) -> None:
        self._channel.put(event)

    def check(self) -> None:
        if self._channel.cancelled:
            raise Cancelled


class Stream(Generic[R]):
    """Reads what `produce(emit)` emits; `result` is what it returned.

    buffer   how many events the producer may be ahead of the reader
    settled  called once, when the producer has ended and no event is left to read: settled(n, left) with the number of
             events that were read, and whether the reader left before the end (cancelled, or dropped the stream)

    >>> def produce(emit):
    ...     for token in (5, 6):
    ...         emit(Event(0, token, ""))
    ...     return "done"
    >>> stream = Stream(produce)
    >>> [event.token for event in stream], stream.result
    ([5, 6], 'done')
    """

    def __init__(
        self,
        produce: Callable[[Emit], R],
        buffer: int = 64,
        settled: Callable[[int, bool], object] | None = None,
    ) -> None:
        self._channel: _Channel = _Channel(buffer, settled)
        self._thread = _Producer(produce, self._channel)

    def __repr__(self) -> str:
        channel = self._channel
        with channel.changed:
            if channel.finished:
                state = "finished"
            elif channel.error is not None:
                state = f"failed with {type(channel.error).__name__}"
            elif channel.cancelled:
                state = "cancelled"
            else:
                state = "not started" if self._thread.ident is None else "running"
            return f"Stream({state}, events: {channel.read} read, {len(channel.events)} waiting)"

    @property
    def over(self) -> bool:
        """Whether the producer has ended, one way or another; events may be left to read."""
        return self._channel.over

    @property
    def read(self) -> int:
        """How many events were read."""
        return self._channel.read

    @property
    def result(self) -> R:
        """What the producer returned, after the end."""
        if not self.over:
            raise InputError("the stream is not over: read it to its end before asking for the result")
        if self._channel.error is not None:
            raise self._channel.error
        if not self._channel.finished:
            raise InputError("the stream was cancelled, so there is no result")
        return self._channel.result

    def cancel(self) -> None:
        """Ends the producer and waits until it is over. Events that were not read are dropped."""
        with self._channel.changed:
            self._channel.cancel(started=self._thread.ident is not None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        with self._channel.changed:
            if self._thread.ident is None and not self._channel.over:
                self._thread.start()

    # -- reading -------------------------------------------------------------------------------------------------------

    def __next__(self) -> Event:
        self._start()
        event = self._channel.take()
        if event is None:
            raise StopIteration
        return event

    def __iter__(self) -> Iterator[Event]:
        self._start()
        try:
            while (event := self._channel.take()) is not None:
                yield event
        finally:  # also when the loop is left
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        self._channel.wake = lambda: loop.call_soon_threadsafe(there.set)
        self._start()
        try:
            while True:
                there.clear()
                if not self._channel.ready:
                    await there.wait()
                elif (event := self._channel.take()) is not None:
                    yield event
                else:
                    return
        finally:
            if self._channel.over:
                self.cancel()
            else:
                await asyncio.to_thread(self.cancel)  # a step may be under way

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.cancel)

    def __del__(self) -> None:
        self._channel.cancel(started=self._thread.ident is not None)  # without waiting: the thread leaves by itself


class _Channel:
    """What the two sides share. The producer's thread knows this and not the stream, so a dropped stream is noticed."""

    def __init__(self, buffer: int, settled: Callable[[int, bool], object] | None) -> None:
        self.buffer, self.settled = buffer, settled
        self.changed = threading.Condition(threading.RLock())
        self.events: deque[Event] = deque()
        self.read = 0  # events that the reader took
        self.over = self.finished = self.cancelled = self.left = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.wake: Callable[[], object] = lambda: None  # tells an event loop that something is there

    @property
    def ready(self) -> bool:
        """Whether `take` would not wait."""
        return bool(self.events) or self.over

    def put(self, event: Event) -> None:
        with self.changed:
            self.changed.wait_for(lambda: len(self.events) < self.buffer or self.cancelled)
            if self.cancelled:
                raise Cancelled
            self.events.append(event)
            self._tell()

    def take(self) -> Event | None:
        """The next event, waiting for it; None at the end."""
        with self.changed:
            self.changed.wait_for(lambda: self.ready)
            if self.events:
                self.changed.notify_all()
                self.read += 1
                event = self.events.popleft()
                self._settle()
                return event
        if self.error is not None and not self.cancelled:
            raise self.error
        return None

    def cancel(self, started: bool) -> None:
        with self.changed:
            self.left = True
            self.events.clear()
            if not self.over:
                self.cancelled = True
                self.over = not started
            self._tell()

    def end(self, result: Any = None, error: BaseException | None = None, finished: bool = False) -> None:
        with self.changed:
            self.result, self.error, self.finished, self.over = result, error, finished, True
            self._tell()

    def _settle(self) -> None:
        if self.over and not self.events and self.settled is not None:
            settled, self.settled = self.settled, None
            settled(self.read, self.left)

    def _tell(self) -> None:
        self._settle()
        self.changed.notify_all()
        with suppress(RuntimeError):  # the event loop of the reader is closed
            self.wake()


class _Producer(threading.Thread):
    """The thread that runs `produce`. It is a daemon, so that a script may end while a stream is open: `_end_all` ends
    it then. Otherwise Python would stop the thread wherever it is, and inside PyTorch that aborts the process."""

    def __init__(self, produce: Callable[[Emit], Any], channel: _Channel) -> None:
        super().__init__(name="lamina-stream", daemon=True)
        self.channel = channel
        self._produce: Callable[[Emit], Any] | None = produce
        self._place = _place()

    def run(self) -> None:
        produce, self._produce = self._produce, None  # kept no longer than it runs
        assert produce is not None
        try:
            result = self._place(lambda: produce(Emit(self.channel)))
        except Cancelled:
            self.channel.end()
        except BaseException as error:
            self.channel.end(error=error)
        else:
            self.channel.end(result, finished=True)


@atexit.register
def _end_all() -> None:
    """Cancels every running producer and waits for it."""
    producers = [thread for thread in threading.enumerate() if isinstance(thread, _Producer)]
    for producer in producers:
        producer.channel.cancel(started=True)
    for producer in producers:
        producer.join()


def _place() -> Callable[[Callable[[], Any]], Any]:
    """Runs something with the context and the current CUDA stream (so also device) of the thread that asked for it:
    what that thread has launched before, on a cache say, comes first."""
    context = contextvars.copy_context()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(work: Callable[[], Any]) -> Any:
        if stream is not None:
            torch.cuda.set_stream(stream)
        return context.run(work)

    return run
