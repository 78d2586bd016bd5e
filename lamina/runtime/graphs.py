"""The captured programs of a model. Each is lent to one caller at a time, and kept for the next.

    with model.graphs.step(cache.rows, chooser, cache) as step:      # nobody else has it until the block ends
        step.take_up(cache, ids, left, ends)
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
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakSet

from torch import nn

from lamina.cache.cache import Cache
from lamina.errors import CaptureError
from lamina.runtime.captured import Captured
from lamina.runtime.fusion import trace_model
from lamina.runtime.multi_token import CapturedPass, width_for
from lamina.runtime.pointers import CacheFormat
from lamina.runtime.step import CapturedStep

if TYPE_CHECKING:
    from lamina.kernels.gemm.fusion import FusionPlan
    from lamina.model import Model
    from lamina.sampling.chooser import Chooser

MOST_SHAPES = 8  # that programs are kept for; those of the least recently used go first
MOST_OF_A_SHAPE = 4

C = TypeVar("C", bound=Captured)


@dataclass
class _Shelf:
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
        self._shelves: OrderedDict[tuple[Any, ...], _Shelf] = OrderedDict()
        self._plans: dict[str, FusionPlan] = {}
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

    def fusion_plan(self, logits: Literal["last", "all"] = "last") -> FusionPlan:
        """Which norms are computed by the launch in front of them.

        Traced at the first use, and again when weights were moved, converted or replaced.

        logits   "last" for decode steps, "all" for passes of several tokens
        """
        with self._changed:
            self._check_weights()
            plan = self._plans.get(logits)
        if plan is None:
            plan = trace_model(self.model, logits)
            with self._changed:
                self._plans[logits] = plan
        return plan

    def why_not(self, rows: int) -> str | None:
        """Why the decode step of this many rows could not be captured, where that was tried."""
        with self._changed:
            shelves = [shelf for key, shelf in self._shelves.items() if key[:1] == (rows,)]
        return next((shelf.failed for shelf in shelves if shelf.failed is not None), None)

    def clear(self) -> None:
        """Drops every program that is not in use; those that are go when they are given back."""
        with self._changed:
            self._shelves.clear()

    @property
    def kept(self) -> dict[tuple[Any, ...], int]:
        """How many programs of each shape there are, the least recently used shape first."""
        with self._changed:
            return {key: len(shelf.free) + len(shelf.lent) for key, shelf in self._shelves.items()}

    def _borrow(self, key: tuple[Any, ...], make: Callable[[], C]) -> C:
        with self._changed:
            while True:
                shelf = self._shelf(key)
                if shelf.failed is not None:
                    raise CaptureError(shelf.failed)
                if shelf.free:
                    one = shelf.free.pop()
                    break
                if len(shelf.lent) < self.limit:
                    one = make()
                    self.captures += 1
                    break
                if not self.wait:
                    raise CaptureError(
                        f"all {len(shelf.lent)} captured programs of this shape are in use; model.graphs.limit is "
                        f"{self.limit}"
                    )
                self._changed.wait(0.1)  # a program may also be dropped, which nobody is told of
            shelf.lent.add(one)
        return one.lend(lambda one: self._take_back(key, shelf, one))

    def _take_back(self, key: tuple[Any, ...], shelf: _Shelf, one: Captured) -> None:
        with self._changed:
            shelf.lent.discard(one)
            if self._shelves.get(key) is shelf and one.failed is None:
                shelf.free.append(one)
            elif one.failed is not None:
                shelf.failed = one.failed
            self._changed.notify_all()

    def _shelf(self, key: tuple[Any, ...]) -> _Shelf:
        """That of a shape, which is now the most recently used."""
        self._check_weights()
        shelf = self._shelves.setdefault(key, _Shelf())
        self._shelves.move_to_end(key)
        idle = [other for other, one in self._shelves.items() if not one.lent and one is not shelf]
        for other in idle[: max(len(self._shelves) - MOST_SHAPES, 0)]:
            del self._shelves[other]
        return shelf

    def _check_weights(self) -> None:
        weights = list(addresses(self.model))
        if weights != self._weights:  # the model was moved or converted: programs read memory it has left
            self._shelves.clear()
            self._plans.clear()
            self._weights = weights


def addresses(module: nn.Module) -> Iterator[int]:
    """Where the weights are stored. `module.parameters()` takes ten times as long, for names that nobody asked for."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter.data_ptr()
    for child in module._modules.values():
        if child is not None:
            yield from addresses(child)
