"""The laws, each a way of feeding the same sequences that must change nothing.

A law is given a subject, a way of keeping, and a source of chance; it feeds the subject's sequences in its own manner
and yields (sequence, position, outputs) for all it got out. The caller compares them with the truth.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.file import load_cache
from lamina.checking.subject import Subject

Found = Iterator[tuple[int, int, Tensor]]


@dataclass(frozen=True)
class Way:
    """A way of keeping: growing (`capacity=None`) or fixed, and the slack."""

    capacity: int | None
    slack: int

    def __str__(self) -> str:
        room = "growing" if self.capacity is None else f"fixed {self.capacity}"
        return f"{room}, slack {self.slack}"


def chunking(subject: Subject, way: Way, rng: random.Random) -> Found:
    """Any way of cutting a sequence into passes."""
    for sequence, row in enumerate(subject.inputs):
        cache = subject.new_cache([sequence], way.capacity, way.slack)
        yield from _in_pieces(subject, cache, [sequence], [0], len(row), rng)


def independence(subject: Subject, way: Way, rng: random.Random) -> Found:
    """Rows of different lengths side by side, with padding in every pass."""
    sequences = list(range(len(subject.inputs)))
    yield from _ragged(subject, subject.new_cache(sequences, way.capacity, way.slack), sequences, rng)


def poison(subject: Subject, way: Way, rng: random.Random) -> Found:
    """The same with NaN in every unused slot before each pass."""
    sequences = list(range(len(subject.inputs)))
    cache = subject.new_cache(sequences, way.capacity, way.slack)
    yield from _ragged(subject, cache, sequences, rng, before=lambda: cache.poison())


def rewind(subject: Subject, way: Way, rng: random.Random) -> Found:
    """Strange tokens appended and taken back, again and again."""
    sequences = list(range(len(subject.inputs)))
    cache = subject.new_cache(sequences, way.capacity, way.slack)

    def stray() -> None:
        for _ in range(rng.randint(0, 2)):
            n = min(rng.randint(0, way.slack), _room(cache, way))
            if n == 0:
                continue
            for width in [1] * n if rng.random() < 0.5 else [n]:
                subject.feed(cache, [_strange(subject, s, width, rng) for s in sequences])
            cache.rewind(n)

    yield from _ragged(subject, cache, sequences, rng, before=stray)


def acceptance(subject: Subject, way: Way, rng: random.Random) -> Found:
    """Passes of which each row accepts its own number of tokens."""
    sequences = list(range(len(subject.inputs)))
    cache = subject.new_cache(sequences, way.capacity, way.slack)
    done = [0] * len(sequences)
    while any(done[s] < len(subject.inputs[s]) for s in sequences):
        extra = rng.randint(0, 3)
        takes = [min(rng.randint(0, 4), len(subject.inputs[s]) - done[s]) for s in sequences]
        takes = takes if sum(takes) else [min(1, len(subject.inputs[s]) - done[s]) for s in sequences]
        parts = []
        for s, take in zip(sequences, takes, strict=True):
            room = extra if way.capacity is None else way.capacity - done[s] - take
            real = subject.inputs[s][done[s] : done[s] + take]
            parts.append(torch.cat([real, _strange(subject, s, min(extra, room), rng)]))
        if max(len(part) for part in parts) == 0:
            continue
        outs = subject.feed(cache, parts, accepted=takes)
        for s, out, take in zip(sequences, outs, takes, strict=True):
            yield s, done[s], out[:take]
            done[s] += take


def rows(subject: Subject, way: Way, rng: random.Random) -> Found:
    """Rows selected, repeated, forked, split and joined in the middle; a fork never changes its parent."""
    sequences = list(range(len(subject.inputs)))
    shortest = min(len(row) for row in subject.inputs)
    cut = rng.randint(1, max(1, shortest - 1))
    cache = subject.new_cache(sequences, way.capacity, way.slack)
    yield from _in_pieces(subject, cache, sequences, [0] * len(sequences), cut, rng)
    fork = cache.fork()
    if _room(fork, way) > 0:
        subject.feed(fork, [_strange(subject, s, 1, rng) for s in sequences])
    order = [rng.choice(sequences) for _ in range(len(sequences) + 1)]
    halves = [cache.select(order[:1]), cache.select(order[1:])]
    mixed = Cache.join([*halves[1].split(), halves[0]])
    order = order[1:] + order[:1]
    yield from _in_pieces(subject, mixed, order, [cut] * len(order), shortest, rng)
    yield from _in_pieces(subject, cache, sequences, [cut] * len(sequences), shortest, rng)


def subsets(subject: Subject, way: Way, rng: random.Random) -> Found:
    """Passes over some of the rows."""
    sequences = list(range(len(subject.inputs)))
    cache = subject.new_cache(sequences, way.capacity, way.slack)
    done = [0] * len(sequences)
    while live := [s for s in sequences if done[s] < len(subject.inputs[s])]:
        chosen = sorted(rng.sample(live, rng.randint(1, len(live))))
        takes = [min(rng.randint(1, 4), len(subject.inputs[s]) - done[s]) for s in chosen]
        parts = [subject.inputs[s][done[s] : done[s] + take] for s, take in zip(chosen, takes, strict=True)]
        for s, out, take in zip(chosen, subject.feed(cache, parts, rows=chosen), takes, strict=True):
            yield s, done[s], out
            done[s] += take


def atomic(subject: Subject, way: Way, rng: random.Random) -> Found:
    """Passes that fail halfway."""
    sequences = list(range(len(subject.inputs)))
    cache = subject.new_cache(sequences, way.capacity, way.slack)

    def failing() -> None:
        width = min(rng.choice([1, 1, 3]), _room(cache, way))
        if width:
            subject.feed(cache, [_strange(subject, s, width, rng) for s in sequences], fail=True)

    yield from _ragged(subject, cache, sequences, rng, before=failing)


def file(subject: Subject, way: Way, rng: random.Random) -> Found:
    """Rows saved in the middle, and what was loaded going on in their place."""
    sequences = list(range(len(subject.inputs)))
    shortest = min(len(row) for row in subject.inputs)
    cut = rng.randint(1, max(1, shortest - 1))
    cache = subject.new_cache(sequences, way.capacity, way.slack)
    yield from _in_pieces(subject, cache, sequences, [0] * len(sequences), cut, rng)
    with tempfile.TemporaryDirectory() as folder:
        cache.save(path := os.path.join(folder, "cache"))
        loaded = load_cache(path, subject.model, residence=subject.residence)
    yield from _in_pieces(subject, loaded, sequences, [cut] * len(sequences), shortest, rng)


LAWS: dict[str, Callable[[Subject, Way, random.Random], Found]] = {
    "chunking": chunking,
    "independence": independence,
    "poison": poison,
    "rewind": rewind,
    "acceptance": acceptance,
    "rows": rows,
    "subsets": subsets,
    "atomic": atomic,
    "file": file,
}


def _in_pieces(
    subject: Subject, cache: Cache, sequences: list[int], done: list[int], end: int, rng: random.Random
) -> Found:
    """Rows that stand at the same position, fed up to `end` in the same pieces."""
    at = done[0]
    while at < end:
        width = min(rng.choice([1, 1, 2, 3, rng.randint(1, end)]), end - at)
        outs = subject.feed(cache, [subject.inputs[s][at : at + width] for s in sequences])
        for s, out in zip(sequences, outs, strict=True):
            yield s, at, out
        at += width


def _ragged(
    subject: Subject,
    cache: Cache,
    sequences: list[int],
    rng: random.Random,
    before: Callable[[], object] = lambda: None,
) -> Found:
    """Rows fed in parts of different sizes until all are through."""
    done = [0] * len(sequences)
    while any(done[s] < len(subject.inputs[s]) for s in sequences):
        before()
        width = rng.choice([1, 1, 2, 5])
        takes = [min(rng.randint(0, width), len(subject.inputs[s]) - done[s]) for s in sequences]
        if max(takes) == 0:
            continue
        parts = [subject.inputs[s][done[s] : done[s] + take] for s, take in zip(sequences, takes, strict=True)]
        for s, out, take in zip(sequences, subject.feed(cache, parts), takes, strict=True):
            yield s, done[s], out
            done[s] += take


def _strange(subject: Subject, sequence: int, n: int, rng: random.Random) -> Tensor:
    """Inputs that do not belong there: those of another place."""
    other = subject.inputs[(sequence + 1) % len(subject.inputs)]
    return other[[rng.randrange(len(other)) for _ in range(n)]]


def _room(cache: Cache, way: Way) -> int:
    """How many more tokens every row has room for."""
    return 3 if way.capacity is None else way.capacity - max(cache.clock.sync())
