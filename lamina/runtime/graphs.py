"""`Graphs`: the captured programs of a model. Each is lent to one caller at a time, and kept for the next.

    with model.graphs.step(cache.rows, chooser, cache) as step:      # no other caller has it until the block ends
        step.begin(cache, ids, remaining, ends)
        step.run(8)

A program serves any cache of its shape: number of rows, tokens per row, sampling settings, and the cache's format: its
codecs, its page size, and whether recurrences log their inputs (slack). There are up to `limit` programs per shape.
While all are lent, the next caller gets a CaptureError (`generate` then runs plain passes, and `Result.how` says so),
or waits if `wait` is set. Waiting is not the default: an abandoned stream keeps its program, and the caller would wait
for ever.

Prompts (`prompt_of`) are captured for one caller of a shape at a time: graphs of many tokens need much memory. Others
run plain passes meanwhile. A program of prompts has a graph per width, which are captured when they are first used.

A program that is garbage collected without `release` is gone; another is captured when one is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakSet

from torch import nn

from lamina.cache.cache import Cache
from lamina.errors import CaptureError
from lamina.kernels.packed.serve import why_model_unread
from lamina.nn.moe.experts import why_host_counts
from lamina.runtime.captured import Captured
from lamina.runtime.fusion import trace_model
from lamina.runtime.multi_token import CapturedPass, width_for
from lamina.runtime.native.step import NativeStep
from lamina.runtime.pointers import CacheFormat
from lamina.runtime.prompts.captured_prompt import CapturedPrompt
from lamina.runtime.step import CapturedStep
from lamina.weights.packed import PackedWeight, every_module

if TYPE_CHECKING:
    from lamina.kernels.gemm.fusion import FusionPlan
    from lamina.model import Model
    from lamina.sampling.chooser import Chooser

MOST_SHAPES = 8  # shapes whose programs are kept; the least recently used are dropped first
MOST_OF_A_SHAPE = 4
PROMPT = "prompt"  # the first part of the shape of prompts, which are kept apart from others
MOST_PROMPTS = 4  # shapes of those that are kept

C = TypeVar("C", bound=Captured)

_trusted: ContextVar[set[Graphs]] = ContextVar("trusted")  # in a call: those whose weights it has looked at


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
    captures  how many programs of steps and passes were made so far; prompts count theirs (`CapturedPrompt.captures`)
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.limit, self.wait, self.captures = MOST_OF_A_SHAPE, False, 0
        self._programs: OrderedDict[tuple[Any, ...], _Programs] = OrderedDict()
        self._plans: dict[str, FusionPlan] = {}
        self._weights: list[int] = []
        self._unread: str | None = None  # see `why_unread`; of `_weights`
        self._counted: str | None = None  # see `why_counted`
        self._changed = Condition()

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self.model,)  # a copy of a model starts without programs

    def step(self, rows: int, chooser: Chooser, cache: Cache | None = None, *, native: bool = False) -> CapturedStep:
        """Borrows the decode step for caches of the format of this one; for plain caches if None.

        native   True: a native program on a CPU, not a CUDA graph
        """
        chooser = replace(chooser, seed=0)  # not part of the shape: `begin` copies the seed in
        cache_format = CacheFormat.of(cache)
        if native:  # the same program serves caches with slack and without
            cache_format = replace(cache_format, logs=False)
        kind = NativeStep if native else CapturedStep
        return self._borrow(
            (rows, chooser, cache_format, native), lambda: kind(self.model, rows, chooser, cache_format)
        )

    def pass_of(self, rows: int, tokens: int, cache: Cache | None = None) -> CapturedPass:
        """Borrows the pass of up to `tokens` tokens per row, for caches of the format of this one."""
        T, cache_format = width_for(rows, tokens), CacheFormat.of(cache)
        return self._borrow((rows, T, cache_format), lambda: CapturedPass(self.model, rows, T, cache_format))

    def prompt_of(self, rows: int, cache: Cache | None = None) -> CapturedPrompt:
        """Borrows the prompts of up to 512 tokens per row, for caches of the format of this one."""
        cache_format = CacheFormat.of(cache)
        return self._borrow((PROMPT, rows, cache_format), lambda: CapturedPrompt(self.model, rows, cache_format))

    def why_no_prompt(self, rows: int) -> str | None:
        """Why prompts of `rows` rows could not be captured, if that was tried and failed."""
        return self._why_failed((PROMPT, rows))

    def why_unread(self) -> str | None:
        """The first packed weight that no kernel of a captured step reads, in words; None if all are read."""
        with self._changed:
            self._check_weights()
            return self._unread

    def why_counted(self) -> str | None:
        """Why the host must know the tokens of each expert in prompts, which a captured prompt cannot tell it."""
        with self._changed:
            self._check_weights()
            return self._counted

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
        return self._why_failed((rows,))

    def _why_failed(self, start: tuple[Any, ...]) -> str | None:
        """Why programs whose shape starts like this could not be captured."""
        with self._changed:
            matching = [found for key, found in self._programs.items() if key[: len(start)] == start]
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
        limit = 1 if key[0] == PROMPT else self.limit
        with self._changed:
            while True:
                found = self._programs_of(key)
                if found.failed is not None:
                    raise CaptureError(found.failed)
                if found.free:
                    one = found.free.pop()
                    break
                if len(found.lent) < limit:
                    one = make()
                    self.captures += key[0] != PROMPT
                    break
                if not self.wait:
                    raise CaptureError(self._in_use(key, len(found.lent)))
                self._changed.wait(0.1)  # a timeout, since a garbage collected program sends no notification
            found.lent.add(one)
        return one.lend(lambda one: self._return(key, found, one))

    def _in_use(self, key: tuple[Any, ...], lent: int) -> str:
        if key[0] == PROMPT:
            return "another caller is using the captured prompts of this shape"
        return f"all {lent} captured programs of this shape are in use; model.graphs.limit is {self.limit}"

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
        alike = {other: one for other, one in self._programs.items() if (other[0] == PROMPT) == (key[0] == PROMPT)}
        most = MOST_PROMPTS if key[0] == PROMPT else MOST_SHAPES
        idle = [other for other, one in alike.items() if not one.lent and one is not found]
        for other in idle[: max(len(alike) - most, 0)]:
            del self._programs[other]
        return found

    def _check_weights(self) -> None:
        trusted = _trusted.get(None)
        if trusted is not None and self in trusted:
            return
        weights = addresses(self.model)
        if weights != self._weights:  # the model was moved or converted: programs would read freed memory
            self._programs.clear()
            self._plans.clear()
            self._unread = why_model_unread(self.model)
            self._counted = why_host_counts(self.model, self.model.dtype)
            self._weights = weights
        if trusted is not None:
            trusted.add(self)


@contextmanager
def weights_stay() -> Iterator[None]:
    """Inside, in this thread, weights are not moved or converted, so the addresses of a model's are read once: for one
    call, which borrows several programs."""
    if _trusted.get(None) is not None:
        yield
        return
    before = _trusted.set(set())
    try:
        yield
    finally:
        _trusted.reset(before)


def addresses(module: nn.Module) -> list[int]:
    """Addresses of all weights. `module.parameters()` takes ten times as long, since it builds names."""
    modules = every_module(module)
    found = [x.data_ptr() for one in modules for x in one._parameters.values() if x is not None]
    if any([issubclass(kind, PackedWeight) for kind in set(map(type, modules))]):
        packed = (one for one in modules if isinstance(one, PackedWeight))
        found += [part.data_ptr() for one in packed for part in one.parts.values()]
    return found
