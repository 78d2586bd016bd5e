"""`Graphs`: the captured programs of a model. Each is lent to one caller at a time, and kept for the next.

    with model.graphs.step(cache.rows, chooser, cache) as step:      # no other caller has it until the block ends
        step.begin(cache, ids, remaining, ends)
        step.run(8)

A program serves any cache of its shape: number of rows, tokens per row, sampling settings, codecs and page size. There
are up to `limit` programs per shape. While all are lent, the next caller gets a CaptureError (`generate` then runs
plain passes, and `Result.how` says so), or waits if `wait` is set. Waiting is not the default: an abandoned stream
keeps its program, and the caller would wait for ever.

A program that is garbage collected without `release` is gone; another is captured when one is needed.
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

MOST_SHAPES = 8  # shapes whose programs are kept; the least recently used are dropped first
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
    limit     how many programs of one shape may be in use at a time
    wait      True: callers beyond the limit wait for a program instead of getting a CaptureError
    captures  how many programs were made so far
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.limit, self.wait, self.captures = MOST_OF_A_SHAPE, False, 0
        self._programs: OrderedDict[tuple[Any, ...], _Programs] = OrderedDict()
        self._plans: dict[str, FusionPlan] = {}
        self._weights: list[int] = []
        self._changed = Condition()

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self.model,)  # a copy of a model starts without programs

    def step(self, rows: int, chooser: Chooser, cache: Cache | None = None) -> CapturedStep:
        """Borrows the decode step for caches with the codecs and page size of this one; for plain caches if None."""
        chooser = replace(chooser, seed=0)  # not part of the shape: `begin` copies the seed in
        cache_format = CacheFormat.of(cache)
        return self._borrow(
            (rows, chooser, cache_format), lambda: CapturedStep(self.model, rows, chooser, cache_format)
        )

    def pass_of(self, rows: int, tokens: int, cache: Cache | None = None) -> CapturedPass:
        """Borrows the pass of up to `tokens` tokens per row, for caches with the codecs and page size of this one."""
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
        """Why the decode step of `rows` rows could not be captured, if that was tried and failed."""
        with self._changed:
            matching = [found for key, found in self._programs.items() if key[:1] == (rows,)]
        return next((found.failed for found in matching if found.failed is not None), None)

    def why_refused(self) -> str | None:
        """Why no decode step can be captured, if a trace of one finds a memory call that kernels refuse."""
        plan = self.fusion_plan()
        return plan.reason if plan.refused else None

    def clear(self) -> None:
        """Drops every program; those that are lent are dropped when they are returned."""
        with self._changed:
            self._programs.clear()

    @property
    def kept(self) -> dict[tuple[Any, ...], int]:
        """Shape -> number of programs, the least recently used shape first."""
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
                self._changed.wait(0.1)  # a timeout, since a garbage collected program sends no notification
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
        """The programs of a shape, which becomes the most recently used one."""
        self._check_weights()
        found = self._programs.setdefault(key, _Programs())
        self._programs.move_to_end(key)
        idle = [other for other, one in self._programs.items() if not one.lent and one is not found]
        for other in idle[: max(len(self._programs) - MOST_SHAPES, 0)]:
            del self._programs[other]
        return found

    def _check_weights(self) -> None:
        weights = list(addresses(self.model))
        if weights != self._weights:  # the model was moved or converted: programs would read freed memory
            self._programs.clear()
            self._plans.clear()
            self._weights = weights


def addresses(module: nn.Module) -> Iterator[int]:
    """Addresses of all weights. `module.parameters()` takes ten times as long, since it builds names."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter.data_ptr()
    for child in module._modules.values():
        if child is not None:
            yield from addresses(child)
