"""`Stream`: an iterator over the events of a generation that runs in its own thread, the producer.

    for event in stream:                 # or: async for event in stream
        print(event.text, end="")
    stream.result                        # the Result that generate would have returned

The producer starts when the first event is asked for, and stays at most `buffer` events ahead of the reader. Leaving
the loop, an error inside it, `cancel()` and dropping the stream all end the producer between two of its steps. Once the
loop is left or `cancel()` has returned, the producer has ended, its cache can be used, and unread events are dropped.
At interpreter exit, every running producer is cancelled and joined.
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
    """A new token of a row. `text`: the characters that the token completed; `reason`: why the row ends with it."""

    row: int
    token: int
    text: str
    reason: Reason | None = None


class EventBuilder:
    """Builds events from tokens. The joined texts of a row's events are the row's text up to the stop string that ended
    it. Text that may be the beginning of a stop string is held back until later tokens decide."""

    def __init__(self, tokenizer: Tokenizer | None, rows: int, stop_strings: Sequence[str] = ()) -> None:
        self._texts = None if tokenizer is None else [tokenizer.stream() for _ in range(rows)]
        self._stop_strings = stop_strings
        self._sent = [0] * rows  # characters in the row's events so far
        self._held = [""] * rows  # text held back, which may begin a stop string

    def event(self, row: int, token: int, reason: Reason | None = None, stop_char: int | None = None) -> Event:
        """stop_char: index in the row's text of the stop string that ends it, if one does"""
        if self._texts is None:
            return Event(row, token, "", reason)
        stream = self._texts[row]
        text = self._held[row] + stream.put(token) + ("" if reason is None else stream.end())
        if stop_char is not None:
            sure = min(max(stop_char - self._sent[row], 0), len(text))
        else:
            sure = len(text) - (0 if reason is not None else partial_match(text, self._stop_strings))
        self._sent[row] += sure
        self._held[row] = text[sure:]
        return Event(row, token, text[:sure], reason)


def partial_match(text: str, strings: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of these strings.

    >>> partial_match("once upon", ["on the"]), partial_match("once upon", ["one", "upon a"])
    (2, 4)
    >>> partial_match("once", ["x"])
    0
    """
    longest = min(len(text), max((len(one) - 1 for one in strings), default=0))
    return next((n for n in range(longest, 0, -1) if any(one.startswith(text[-n:]) for one in strings)), 0)


class Cancelled(Exception):
    """Raised in a producer whose stream was cancelled or dropped."""


class Emit:
    """The producer calls `emit(event)`, which waits while `buffer` events are unread, and `emit.check()` in a step
    without an event. Both raise `Cancelled` once the stream is cancelled."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    def __call__(self, event: Event) -> None:
        self._channel.put(event)

    def check(self) -> None:
        if self._channel.cancelled:
            raise Cancelled


class Stream(Generic[R]):
    """Iterates over the events that `produce(emit)` emits; `result` is its return value.

    buffer   events that the producer may be ahead of the reader
    settled  called once as settled(n, left), after the producer has ended and no event is left to read. n: events that
             were read; left: whether the reader left early (cancelled or dropped the stream)

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
        """Whether the producer has ended, by finishing, failing or cancelling; unread events may be left."""
        return self._channel.over

    @property
    def read(self) -> int:
        """Number of events that were read."""
        return self._channel.read

    @property
    def result(self) -> R:
        """The producer's return value, once it has finished; its error, if it failed, is raised here."""
        if not self.over:
            raise InputError("the stream is not over: read it to its end before asking for the result")
        if self._channel.error is not None:
            raise self._channel.error
        if not self._channel.finished:
            raise InputError("the stream was cancelled, so there is no result: read a stream to its end to get one")
        return self._channel.result

    def cancel(self) -> None:
        """Ends the producer and waits for it. Unread events are dropped."""
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
        finally:  # also when the caller leaves the loop
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._channel.wake = lambda: loop.call_soon_threadsafe(arrived.set)
        self._start()
        try:
            while True:
                arrived.clear()
                if not self._channel.ready:
                    await arrived.wait()
                elif (event := self._channel.take()) is not None:
                    yield event
                else:
                    return
        finally:
            if self._channel.over:
                self.cancel()
            else:
                await asyncio.to_thread(self.cancel)  # waits for the step that is running

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.cancel)

    def __del__(self) -> None:
        self._channel.cancel(started=self._thread.ident is not None)  # does not wait: the thread ends by itself


class _Channel:
    """The queue and state that producer and reader share. The producer's thread holds the channel and not the stream,
    so that `Stream.__del__` runs when the reader drops the stream."""

    def __init__(self, buffer: int, settled: Callable[[int, bool], object] | None) -> None:
        self.buffer, self.settled = buffer, settled
        self.changed = threading.Condition(threading.RLock())
        self.events: deque[Event] = deque()
        self.read = 0  # events that were read
        self.over = self.finished = self.cancelled = self.left = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.wake: Callable[[], object] = lambda: None  # tells an asyncio reader that `ready` may have changed

    @property
    def ready(self) -> bool:
        """Whether `take` returns without waiting."""
        return bool(self.events) or self.over

    def put(self, event: Event) -> None:
        with self.changed:
            self.changed.wait_for(lambda: len(self.events) < self.buffer or self.cancelled)
            if self.cancelled:
                raise Cancelled
            self.events.append(event)
            self._notify()

    def take(self) -> Event | None:
        """Waits for the next event; None at the end."""
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
            self._notify()

    def end(self, result: Any = None, error: BaseException | None = None, finished: bool = False) -> None:
        with self.changed:
            self.result, self.error, self.finished, self.over = result, error, finished, True
            self._notify()

    def _settle(self) -> None:
        if self.over and not self.events and self.settled is not None:
            settled, self.settled = self.settled, None
            settled(self.read, self.left)

    def _notify(self) -> None:
        self._settle()
        self.changed.notify_all()
        with suppress(RuntimeError):  # the event loop of the reader is closed
            self.wake()


class _Producer(threading.Thread):
    """The thread that runs `produce`. It is a daemon, so that a script may exit while a stream is open. `_cancel_all`
    then ends it in order: Python would kill a daemon thread anywhere, and inside PyTorch that aborts the process."""

    def __init__(self, produce: Callable[[Emit], Any], channel: _Channel) -> None:
        super().__init__(name="lamina-stream", daemon=True)
        self.channel = channel
        self._produce: Callable[[Emit], Any] | None = produce
        self._run_like_caller = _run_like_caller()

    def run(self) -> None:
        produce, self._produce = self._produce, None  # or the thread object would keep its closure alive
        assert produce is not None
        try:
            result = self._run_like_caller(lambda: produce(Emit(self.channel)))
        except Cancelled:
            self.channel.end()
        except BaseException as error:
            self.channel.end(error=error)
        else:
            self.channel.end(result, finished=True)


@atexit.register
def _cancel_all() -> None:
    """Cancels and joins every running producer."""
    producers = [thread for thread in threading.enumerate() if isinstance(thread, _Producer)]
    for producer in producers:
        producer.channel.cancel(started=True)
    for producer in producers:
        producer.join()


def _run_like_caller() -> Callable[[Callable[[], Any]], Any]:
    """A function that runs its argument in another thread with this thread's context variables and current CUDA stream
    (which implies the device), so that it is ordered after kernels that this thread has launched on a cache."""
    context = contextvars.copy_context()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(work: Callable[[], Any]) -> Any:
        if stream is not None:
            torch.cuda.set_stream(stream)
        return context.run(work)

    return run
