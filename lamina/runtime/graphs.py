"""The captured programs of a model. Each is lent to one caller at a time, and kept for the next.

    with model.graphs.step(cache.rows, chooser, cache) as step:      # nobody else has it until the block ends
        step.begin(cache, ids, left, ends)
        step.run(8)

A program serves any cache of its shape: the number of rows and of tokens, the way of choosing, codecs and page size. Up
to `limit` programs of one shape exist; while all of them are lent, the next caller is told so by a CaptureError (and
`generate` runs plain passes, which `Result.how` says), or waits if `wait` is set. Waiting is not the default: a stream
that nobody reads on would keep its program, and the caller would wait for ever.

A program that is dropped without `release` is gone, and another is captured when one is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from torch import nn

from lamina.cache.cache import Cache
from lamina.errors import CaptureError
from lamina.runtime.captured import Captured
from lamina.runtime.multi_token import CapturedPass, width_for
from lamina.runtime.pointers import CacheFormat
from lamina.runtime.step import CapturedStep

if TYPE_CHECKING:
    from lamina.model import Model
    from lamina.sampling.chooser import Chooser

MOST_SHAPES = 8  # that programs are kept for; those of the least recently used go first
MOST_OF_A_SHAPE = 4

C = TypeVar("C", bound=Captured)


@dataclass
class _Programs:
    """The programs of one shape."""

    free: list[Any] = field(default_factory=list)
    lent: WeakSet[Any] = field(default_factory=WeakSet)
    failed: str | None = None  # why no program of this shape can be captured


class Graphs:
    """
    limit     programs of one shape that may be in use at a time
    wait      whether callers beyond the limit wait for one, rather than being refused
    captures  programs that were made so far
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.limit, self.wait, self.captures = MOST_OF_A_SHAPE, False, 0
        self._programs: OrderedDict[tuple[Any, ...], _Programs] = OrderedDict()
        self._weights: list[int] = []
        self._changed = Condition()

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self.model,)  # a copy of a model begins without programs

    def step(self, rows: int, chooser: Chooser, cache: Cache | None = None) -> CapturedStep:
        """Borrows the decode step for caches with the codecs and page size of this one; for plain caches if None."""
        chooser = replace(chooser, seed=0)  # seeds are copied in
        cache_format = CacheFormat.of(cache)
        return self._borrow(
            (rows, chooser, cache_format), lambda: CapturedStep(self.model, rows, chooser, cache_format)
        )

    def pass_of(self, rows: int, tokens: int, cache: Cache | None = None) -> CapturedPass:
        """Borrows the pass that reads up to this many tokens a row, of caches that are kept as this one is."""
        T, cache_format = width_for(rows, tokens), CacheFormat.of(cache)
        return self._borrow((rows, T, cache_format), lambda: CapturedPass(self.model, rows, T, cache_format))

    def why_not(self, rows: int) -> str | None:
        """Why the decode step of this many rows could not be captured, where that was tried."""
        with self._changed:
            matching = [found for key, found in self._programs.items() if key[:1] == (rows,)]
        return next((found.failed for found in matching if found.failed is not None), None)

    def clear(self) -> None:
        """Drops every program that is not in use; those that are go when they are given back."""
        with self._changed:
            self._programs.clear()

    @property
    def kept(self) -> dict[tuple[Any, ...], int]:
        """How many programs of each shape there are, the least recently used shape first."""
        with self._changed:
            return {key: len(found.free) + len(found.lent) for key, found in self._programs.items()}

    def _borrow(self, key: tuple[Any, ...], make: Callable[[], C]) -> C:
        with self._changed:
            while True:
                found = self._programs_of(key)
                if found.failed is not None:
                    raise CaptureError(found.failed)
                if found.free:
                    one = found.free.pop()
                    break
                if len(found.lent) < self.limit:
                    one = make()
                    self.captures += 1
                    break
                if not self.wait:
                    raise CaptureError(
                        f"all {len(found.lent)} captured programs of this shape are in use; model.graphs.limit is "
                        f"{self.limit}"
                    )
                self._changed.wait(0.1)  # a program may also be dropped, which nobody is told of
            found.lent.add(one)
        return one.lend(lambda one: self._return(key, found, one))

    def _return(self, key: tuple[Any, ...], found: _Programs, one: Captured) -> None:
        with self._changed:
            found.lent.discard(one)
            if self._programs.get(key) is found and one.failed is None:
                found.free.append(one)
            elif one.failed is not None:
                found.failed = one.failed
            self._changed.notify_all()

    def _programs_of(self, key: tuple[Any, ...]) -> _Programs:
        """That of a shape, which is now the most recently used."""
        weights = list(addresses(self.model))
        if weights != self._weights:  # the model was moved or converted: programs read memory it has left
            self._programs.clear()
            self._weights = weights
        found = self._programs.setdefault(key, _Programs())
        self._programs.move_to_end(key)
        idle = [other for other, one in self._programs.items() if not one.lent and one is not found]
        for other in idle[: max(len(self._programs) - MOST_SHAPES, 0)]:
            del self._programs[other]
        return found


def addresses(module: nn.Module) -> Iterator[int]:
    """Where the weights are stored. `module.parameters()` takes ten times as long, for names that nobody asked for."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter.data_ptr()
    for child in module._modules.values():
        if child is not None:
            yield from addresses(child)
