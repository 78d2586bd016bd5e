"""Streams: order, backpressure, errors, the end, and cancelling in every way."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

import pytest

from lamina.errors import InputError
from lamina.generation.stream import Cancelled, Emit, Event, EventBuilder, Stream
from tests.generation.text import tokenizer

TIMEOUT = 10.0


class Producer:
    """Emits tokens 0, 1, … and keeps what happened to it."""

    def __init__(self, count: int | None = None, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.emitted = 0
        self.cleaned = threading.Event()

    def __call__(self, emit: Emit) -> str:
        try:
            while self.count is None or self.emitted < self.count:
                emit(Event(0, self.emitted, ""))
                self.emitted += 1
            if self.error is not None:
                raise self.error
            return "done"
        except Cancelled:
            time.sleep(0.05)  # whoever cancels waits for this
            self.cleaned.set()
            raise


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + TIMEOUT
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


def test_events_come_in_order_and_the_result_after_them() -> None:
    stream = Stream(Producer(200), buffer=3)
    with pytest.raises(InputError, match="the stream is not over"):
        _ = stream.result
    assert [event.token for event in stream] == list(range(200))
    assert stream.result == "done"
    assert list(stream) == []


def test_a_stream_can_be_read_with_next() -> None:
    stream = Stream(Producer(2))
    assert (next(stream).token, next(stream).token) == (0, 1)
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.result == "done"


def test_nothing_runs_before_the_first_event_is_asked_for() -> None:
    producer = Producer()
    stream = Stream(producer)
    time.sleep(0.02)
    assert producer.emitted == 0
    stream.cancel()
    assert list(stream) == [] and producer.emitted == 0
    with pytest.raises(InputError, match="the stream was cancelled"):
        _ = stream.result


def test_the_producer_is_never_more_than_the_buffer_ahead() -> None:
    producer = Producer()
    stream = Stream(producer, buffer=4)
    for read in range(1, 6):
        next(stream)
        assert eventually(lambda read=read: producer.emitted == read + 4)
    time.sleep(0.02)
    assert producer.emitted == 9
    stream.cancel()


def test_cancelling_waits_until_the_producer_has_cleaned_up() -> None:
    producer = Producer()
    stream = Stream(producer)
    next(stream)
    stream.cancel()
    assert producer.cleaned.is_set()
    assert list(stream) == []
    stream.cancel()


def test_leaving_the_loop_cancels() -> None:
    producer = Producer()
    for event in Stream(producer):
        if event.token == 3:
            break
    assert producer.cleaned.is_set()
    producer = Producer()
    with pytest.raises(ZeroDivisionError):
        for _ in Stream(producer):
            raise ZeroDivisionError
    assert eventually(producer.cleaned.is_set)


def test_leaving_a_with_block_cancels() -> None:
    producer = Producer()
    with Stream(producer) as stream:
        next(stream)
    assert producer.cleaned.is_set()


def test_a_dropped_stream_ends_its_producer() -> None:
    producer = Producer()
    stream = Stream(producer)
    next(stream)
    del stream
    gc.collect()
    assert eventually(producer.cleaned.is_set)


def test_a_step_without_events_notices_that_it_is_cancelled() -> None:
    began, left = threading.Event(), threading.Event()

    def produce(emit: Emit) -> None:
        emit(Event(0, 1, ""))
        began.set()
        try:
            while True:
                emit.check()
                time.sleep(0.001)
        except Cancelled:
            left.set()
            raise

    stream = Stream(produce)
    next(stream)
    assert began.wait(TIMEOUT)
    stream.cancel()
    assert left.is_set()


def test_an_error_reaches_the_reader_after_the_events_before_it() -> None:
    stream = Stream(Producer(3, InputError("no room")))
    seen = []
    with pytest.raises(InputError, match="no room"):
        for event in stream:
            seen.append(event.token)
    assert seen == [0, 1, 2]
    with pytest.raises(InputError, match="no room"):
        _ = stream.result


def test_async_reading_gives_the_same() -> None:
    async def read(count: int) -> tuple[list[int], str]:
        stream = Stream(Producer(count), buffer=2)
        return [event.token async for event in stream], stream.result

    async def many() -> list[tuple[list[int], str]]:
        return await asyncio.gather(*(read(n) for n in range(40)))

    assert asyncio.run(many()) == [(list(range(n)), "done") for n in range(40)]


def test_async_errors_reach_the_reader() -> None:
    async def read() -> None:
        async for _ in Stream(Producer(3, InputError("no room"))):
            pass

    with pytest.raises(InputError, match="no room"):
        asyncio.run(read())


@pytest.mark.parametrize("way", ["break", "task", "with"])
def test_async_leaving_cancels_and_never_blocks_the_loop(way: str) -> None:
    producer = Producer()

    async def read() -> None:
        async for event in Stream(producer):
            if event.token == 3:
                break

    async def inside() -> None:
        async with Stream(producer) as stream:
            async for event in stream:
                if event.token == 3:
                    return

    async def wait_for_ever() -> None:
        def produce(emit: Emit) -> None:
            producer(emit)

        async for event in Stream(produce):
            if event.token == 3:
                await asyncio.sleep(TIMEOUT)

    async def main() -> None:
        if way == "task":
            task = asyncio.create_task(wait_for_ever())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await (read() if way == "break" else inside())
        for _ in range(1000):
            if producer.cleaned.is_set():
                return
            await asyncio.sleep(0.005)

    asyncio.run(main())
    assert producer.cleaned.is_set()


def test_what_was_not_read_is_gone_after_leaving() -> None:
    stream = Stream(Producer(5))
    next(stream)
    assert eventually(lambda: stream.over)
    stream.cancel()
    assert list(stream) == [] and stream.read == 1
    assert stream.result == "done"


@pytest.mark.parametrize(
    ("reads", "leaves", "expected"), [(5, False, (5, False)), (2, True, (2, True)), (0, True, (0, True))]
)
def test_the_end_is_told_once_with_what_was_read(reads: int, leaves: bool, expected: tuple[int, bool]) -> None:
    told: list[tuple[int, bool]] = []
    stream = Stream(Producer(5), settled=lambda read, left: told.append((read, left)))
    for _ in range(reads):
        next(stream)
    if leaves:
        assert told == []
        stream.cancel()
    assert eventually(lambda: told == [expected])
    stream.cancel()
    del stream
    gc.collect()
    assert told == [expected]


def test_a_stream_that_was_never_started_is_settled_when_dropped() -> None:
    told: list[tuple[int, bool]] = []
    Stream(Producer(5), settled=lambda read, left: told.append((read, left)))
    gc.collect()
    assert told == [(0, True)]


def test_a_stream_tells_where_it_is() -> None:
    stream = Stream(Producer(5), buffer=2)
    assert repr(stream) == "Stream(not started, events: 0 read, 0 waiting)"
    next(stream)
    assert eventually(lambda: repr(stream) == "Stream(running, events: 1 read, 2 waiting)")
    for _ in range(4):
        next(stream)
    assert eventually(lambda: repr(stream) == "Stream(finished, events: 5 read, 0 waiting)")
    stream = Stream(Producer())
    next(stream)
    stream.cancel()
    assert repr(stream) == "Stream(cancelled, events: 1 read, 0 waiting)"
    stream = Stream(Producer(0, InputError("no room")))
    with pytest.raises(InputError):
        next(stream)
    assert repr(stream) == "Stream(failed with InputError, events: 0 read, 0 waiting)"


def test_pieces_are_whole_characters_and_join_to_the_text_of_the_tokens() -> None:
    text = "naïve 日本語 😀👩 the thing"
    ids = tokenizer().encode(text)
    pieces = EventBuilder(tokenizer(), rows=2)
    events = [pieces.event(1, token, "length" if n == len(ids) - 1 else None) for n, token in enumerate(ids)]
    assert "".join(event.text for event in events) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in event.text for event in events)
    assert [event.token for event in events] == ids and events[-1].reason == "length"
    half = tokenizer().encode("😀")[0]
    assert pieces.event(0, half, "eos").text == "\N{REPLACEMENT CHARACTER}"
    assert EventBuilder(None, 1).event(0, 5) == Event(0, 5, "", None)
