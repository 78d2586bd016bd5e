"""The laws, each a way of feeding the same sequences that must change nothing.

A law is given a subject, a way of keeping, a source of chance and how often it is tried. It feeds the subject's
sequences in its own manner, and the subject compares all that comes out with the reference. A sequence that is tried
several times is as many rows of one cache, each cut in its own way: rows do not know of each other, and passes are few.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.cache.cache import Cache
from lamina.cache.io.cache_file import load_cache

if TYPE_CHECKING:
    from lamina.checking.probe import Probe


@dataclass(frozen=True)
class Way:
    """A way of keeping: growing (`capacity=None`) or fixed, and the slack. A row never holds more than `most`."""

    capacity: int | None
    slack: int
    most: int | None = None

    def __str__(self) -> str:
        return f"{self.room}, slack {self.slack}"

    @property
    def room(self) -> str:
        return "growing" if self.capacity is None else f"fixed {self.capacity}"

    def fitting(self, wanted: int, length: int) -> int:
        """How many of the wanted tokens a row of this length has room for."""
        ends = [end for end in (self.capacity, self.most) if end is not None]
        return max(0, min([wanted, *(end - length for end in ends)]))


def chunking(subject: Probe, way: Way, rng: random.Random, tries: int) -> None:
    """Any way of cutting a sequence into passes, one row at a time."""
    for sequence in _sequences(subject, tries):
        row, at = subject.rows[sequence], 0
        cache = subject.new_cache([sequence], way)
        while at < len(row):
            width = rng.choice([1, 1, 2, 3, rng.randint(1, len(row))])
            subject.feed(cache, [row[at : at + width]])
            at += width


def independence(subject: Probe, way: Way, rng: random.Random, tries: int) -> None:
    """Rows of different lengths side by side, with padding in every pass."""
    sequences = _sequences(subject, tries)
    _ragged(subject, subject.new_cache(sequences, way), sequences, rng)


def poison(subject: Probe, way: Way, rng: random.Random, tries: int) -> None:
    """The same with NaN in every unused slot before each pass."""
    sequences = _sequences(subject, tries)
    cache = subject.new_cache(sequences, way)
    _ragged(subject, cache, sequences, rng, before=lambda _: cache.poison())


def rewind(subject: Probe, way: Way, rng: random.Random, tries: int) -> None:
    """Strange tokens appended and taken back, again and again, in each row another number."""
    sequences = _sequences(subject, tries)
    cache = subject.new_cache(sequences, way)

    def stray(done: list[int]) -> None:
        for _ in range(rng.choice([0, 1, 1, 2]) if any(done) else 1):
            counts = [way.fitting(rng.randint(0, way.slack), at) for at in done]
            parts = [_strange(subject, s, n, rng) for s, n in zip(sequences, counts, strict=True)]
            one_by_one = rng.random() < 0.3
            for t in range(max(counts)) if one_by_one else [0] if any(counts) else []:
                subject.stray(cache, [part[t : t + 1] for part in parts] if one_by_one else parts)
            cache.rewind(counts)

    _ragged(subject, cache, sequences, rng, before=stray)


def acceptance(subject: Probe, way: Way, rng: random.Random, tries: int) -> None:
    """Drafts: passes of which each row accepts the first tokens, a number of its own, and drops the strange ones."""
    sequences = _sequences(subject, tries)
    cache = subject.new_cache(sequences, way)
    done, ends = [0] * len(sequences), [len(subject.rows[s]) for s in sequences]
    while done != ends:
        width = rng.randint(1, _several(ends))
        right = rng.choices([width, rng.randint(0, width)], [2, 3], k=len(done))
        takes = [min(n, b - a) for n, a, b in zip(right, done, ends, strict=True)]
        parts = []
        for s, at, take in zip(sequences, done, takes, strict=True):
            strange = _strange(subject, s, way.fitting(width - take, at + take), rng)
            parts.append([*subject.rows[s][at : at + take], *strange])
        if any(parts):
            subject.feed(cache, parts, accepted=takes)
        done = [at + take for at, take in zip(done, takes, strict=True)]


def rows(subject: Probe, way: Way, rng: random.Random, tries: int) -> None:
    """Rows selected, repeated, forked, split and joined in the middle, none of which changes the parent."""
    sequences = _sequences(subject, tries)
    cache = subject.new_cache(sequences, way)
    cuts = _prompts(subject, cache, sequences, rng)
    fork = cache.fork()
    strange = [_strange(subject, s, way.fitting(3, at), rng) for s, at in zip(sequences, cuts, strict=True)]
    if any(strange):
        subject.stray(fork, strange)
    order = [rng.randrange(len(sequences)) for _ in range(len(sequences) + 1)]
    first, others = cache.select(order[:1]), cache.select(order[1:])
    mixed = Cache.join([*others.split(), first])
    order = order[1:] + order[:1]
    _ragged(subject, mixed, [sequences[r] for r in order], rng, done=[cuts[r] for r in order])
    parts = [subject.rows[s][at : at + rng.randint(0, 2)] for s, at in zip(sequences, cuts, strict=True)]
    if any(parts):
        subject.feed(cache, parts)


def subsets(subject: Probe, way: Way, rng: random.Random, tries: int) -> None:
    """Passes over some of the rows."""
    sequences = _sequences(subject, tries)
    cache = subject.new_cache(sequences, way)
    done, ends = [0] * len(sequences), [len(subject.rows[s]) for s in sequences]
    while live := [r for r in range(len(sequences)) if done[r] < ends[r]]:
        chosen = sorted(rng.sample(live, rng.randint(1, len(live))))
        takes = [min(rng.randint(1, _several(ends)), ends[r] - done[r]) for r in chosen]
        parts = [subject.rows[sequences[r]][done[r] : done[r] + n] for r, n in zip(chosen, takes, strict=True)]
        subject.feed(cache, parts, rows=chosen)
        for r, take in zip(chosen, takes, strict=True):
            done[r] += take


def atomic(subject: Probe, way: Way, rng: random.Random, tries: int) -> None:
    """Passes that fail halfway."""
    sequences = _sequences(subject, tries)
    cache = subject.new_cache(sequences, way)

    def failing(done: list[int]) -> None:
        if any(done) and rng.random() < 0.3:
            return
        width, blocks = rng.choice([1, 2, 4]), len(subject.model.blocks)
        strange = [_strange(subject, s, way.fitting(width, at), rng) for s, at in zip(sequences, done, strict=True)]
        if any(strange):
            subject.stray(cache, strange, blocks=rng.choice([blocks, rng.randint(1, blocks)]))

    _ragged(subject, cache, sequences, rng, before=failing)


def file(subject: Probe, way: Way, rng: random.Random, tries: int) -> None:
    """Rows saved in the middle, and what was loaded going on in their place."""
    sequences = _sequences(subject, tries)
    cache = subject.new_cache(sequences, way)
    cuts = _prompts(subject, cache, sequences, rng)
    with tempfile.TemporaryDirectory() as folder:
        cache.save(path := os.path.join(folder, "cache"))
        loaded = load_cache(path, subject.model, residence=subject.residence)
    _ragged(subject, loaded, sequences, rng, done=cuts)


Law = Callable[["Probe", Way, random.Random, int], None]

LAWS: dict[str, Law] = {
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


def _sequences(subject: Probe, tries: int) -> list[int]:
    return list(range(len(subject.rows))) * tries


def _prompts(subject: Probe, cache: Cache, sequences: list[int], rng: random.Random) -> list[int]:
    """Half of each row or more in one pass, but not its last token, and one more token for some; -> all lengths"""
    ends = [rng.randint(max(1, len(subject.rows[s]) // 2), len(subject.rows[s]) - 1) for s in sequences]
    firsts = [max(1, end - rng.randint(0, 1)) for end in ends]
    subject.feed(cache, [subject.rows[s][:n] for s, n in zip(sequences, firsts, strict=True)])
    return _ragged(subject, cache, sequences, rng, firsts, ends)


def _several(ends: list[int]) -> int:
    """The most tokens a row gets in a pass: long rows are not fed one by one."""
    return max(4, max(ends) // 8)


def _ragged(
    subject: Probe,
    cache: Cache,
    sequences: list[int],
    rng: random.Random,
    done: list[int] | None = None,
    ends: list[int] | None = None,
    before: Callable[[list[int]], object] = lambda done: None,
) -> list[int]:
    """Rows fed from `done` (the start) to `ends` (their own), in parts of different sizes; -> `ends`"""
    done = [0] * len(sequences) if done is None else done
    ends = [len(subject.rows[s]) for s in sequences] if ends is None else ends
    while done != ends:
        width = rng.choice([1, 1, 1, 2, 5, 2 * _several(ends)])
        sizes = rng.choices([0, width, rng.randint(1, width)], [1, 4, 2], k=len(done))
        takes = [min(size, b - a) for size, a, b in zip(sizes, done, ends, strict=True)]
        if not any(takes):
            continue
        before(done)
        parts = [subject.rows[s][a : a + n] for s, a, n in zip(sequences, done, takes, strict=True)]
        subject.feed(cache, parts)
        done = [a + n for a, n in zip(done, takes, strict=True)]
    return ends


def _strange(subject: Probe, sequence: int, n: int, rng: random.Random) -> Sequence[int]:
    """Places of tokens that do not belong there: those of another row."""
    return rng.choices(subject.rows[(sequence + 1) % len(subject.rows)], k=n)
