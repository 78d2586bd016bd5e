"""`Captured`: the base of `CapturedStep`, `CapturedPass` and `CapturedPrompt`, passes that are captured in CUDA graphs.

They take the place of a `Step` in model code. Their kernels find the cache through tables of addresses, which are
copied in. Each captured program owns its inputs, tables and kernel workspace, so it serves one caller at a time
(`lamina.runtime.graphs` lends them), on the CUDA stream on which it was borrowed.

Without CUDA, where Triton interprets kernels on the CPU, a replay runs the program again; the tests do that.
"""

from __future__ import annotations

import math
import weakref
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.window import Sliding, Window
from lamina.cache.backend import Backend
from lamina.cache.cache import Cache
from lamina.cache.memory import Memory
from lamina.cache.passes import last_tokens
from lamina.cache.spec import Tokens
from lamina.errors import CaptureError, InputError, LaminaError
from lamina.kernels.columns import HEADER, WIDTH
from lamina.runtime.builders import wait_for_kernels
from lamina.runtime.cuda_graph import Program, capture_graphs, copy_in, current_stream
from lamina.runtime.eligibility import why_not_read
from lamina.runtime.gpu.backend import KERNELS, TableEntry
from lamina.runtime.pointers import CacheFormat, entries_of, header_of, score_room, stores_of, tables_of

if TYPE_CHECKING:
    from lamina.cache.layers.base import Key
    from lamina.kernels.gemm.fusion import Fusions
    from lamina.model import Model
    from lamina.recurrence.rule import Tensors


LEAST_ROOM, MOST_ROOM = 64, 8  # tokens; times the room that is needed, above which a program is captured again
ALIGNED = 16  # int64 values, of which inputs begin at multiples; kernels are built for multiples of 16 bytes


class Captured:
    """A `Pass` of T tokens per row over any cache of the model with this number of rows and this format.

    tables   [counts, entries, columns]: a row for each entry of the cache, with the address of the pass's counts and,
             if a second graph commits, once more with the address of the accepted counts
    """

    backend: Backend[Any, TableEntry] = KERNELS
    header: Tensor  # [columns], of `columns.HEADER`
    tables: Tensor
    counts: Tensor  # [rows]
    ids: Tensor  # [rows, T]
    valid: Tensor | None = None  # None: kernels skip padding by `counts`
    constants: dict[Key, Tensors]  # of each recurrence that logs its inputs, as model code gave them
    logits_of: Literal["last", "all"] = "last"  # the tokens whose logits a program computes
    room = LEAST_ROOM  # tokens of a row that `recall` reads back without a window, a power of two

    def __init__(self, model: Model, rows: int, T: int, cache_format: CacheFormat, counts: int) -> None:
        from lamina.kernels.workspace import Workspace  # imports Triton

        entries = sum(len(entry) for entry in model.specs)
        self.model, self.rows, self.T, self.format = model, rows, T, cache_format
        self.device = model.device
        self.workspace = Workspace(self.device)
        self._make_inputs(self._input_shapes(counts, entries))
        self.positions, self.all_counts = self._int_zeros(rows, T), self.counts
        later = self.tables[1] if counts > 1 else None
        self.entries: list[dict[str, TableEntry]] = entries_of(model, self.tables[0], later, cache_format)
        self.constants = {}
        self.logits: Tensor | None = None
        self.hidden: dict[int, Tensor] = {}
        self.replays: dict[Hashable, Program] = {}  # key of a program -> its replay, once captured
        self.pool: Any = None  # memory that graphs which are captured later share with the first
        self.failed: str | None = None  # why the programs cannot be captured
        self._ran: set[Hashable] = set()  # keys of programs that ran without an error, if kernels are interpreted
        self._placed: tuple[list[tuple[int, int]], list[int]] | None = None  # stores and header that were copied in
        self._bound_cache: weakref.ref[Cache] | None = None  # the cache that was given to `_bind` last
        self._bound_kind: tuple[Any, ...] | None = None  # how that cache is kept, which is known to be served
        self._scores: Tensor | None = None  # [rows, scored, room]: see `_scores_for`
        self._stream = current_stream(self.device)  # the stream of the borrower, on which graphs are launched
        self._done: torch.cuda.Event | None = None  # recorded after the last launch of the previous borrower
        self._give_back: Callable[[Any], None] | None = None

    def _input_shapes(self, counts: int, entries: int) -> dict[str, tuple[int, ...]]:
        """What the host copies in, in the order of its memory: attribute -> shape. The ids are the last."""
        return {
            "header": (len(HEADER),), "tables": (counts, entries, WIDTH), "counts": (self.rows,),
            "ids": (self.rows, self.T),
        }  # fmt: skip

    def _make_inputs(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """All in one tensor, so that one copy fills it."""
        sizes = [math.prod(shape) for shape in shapes.values()]
        *starts, end = accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
        self._inputs, self._starts = self._int_zeros(end), dict(zip(shapes, starts, strict=True))
        for (name, shape), start, size in zip(shapes.items(), starts, sizes, strict=True):
            setattr(self, name, self._inputs[start : start + size].view(shape))

    def _copy_inputs(self, **values: Sequence[int]) -> None:
        """Copies values of these inputs in at once. Inputs between the first and the last of them become zero."""
        first = min(self._starts[name] for name in values)
        end = max(self._starts[name] + len(part) for name, part in values.items())
        whole = array("q", bytes(8 * (end - first)))
        for name, part in values.items():
            at = self._starts[name] - first
            whole[at : at + len(part)] = array("q", part)
        copy_in(self._inputs[first:end], whole)

    def memory(self, i: int) -> Memory:
        return Memory(self, i, self.entries[i])

    def last(self, x: Tensor) -> Tensor:
        return last_tokens(x, self.all_counts)

    def has_run(self, ids: Tensor | None) -> None:
        """Does nothing: the ids are in `self.ids` already."""

    # -- one borrower at a time --------------------------------------------------------------------------------------

    def lend(self, give_back: Callable[[Any], None]) -> Self:
        """Begins a loan: launches go to the caller's current stream, after those of the previous borrower."""
        self._give_back, self._stream = give_back, current_stream(self.device)
        if self._stream is not None and self._done is not None:
            self._stream.wait_event(self._done)
        return self

    def release(self) -> None:
        """Ends the loan, so that another caller can borrow the program. Does nothing if it has ended already."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            self._drop_cache()
            if self._stream is not None:
                self._done = self._stream.record_event()
            give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _drop_cache(self) -> None:
        """Forgets the borrower's cache."""
        self._placed, self._bound_cache = None, None

    # -- programs ----------------------------------------------------------------------------------------------------

    def programs(self) -> Mapping[Any, Program]:
        """The functions to capture, each in a graph of its own, by a key."""
        raise TypeError(f"{type(self).__name__} names no programs")

    def capture(self, *which: Hashable) -> None:
        """Captures the programs of these keys (all when none is given), unless that is done. The tables must point at a
        cache, which is not changed: the counts are 0 meanwhile. Raises CaptureError if a kernel cannot be built or
        launched."""
        missing = [key for key in which or self.programs() if key not in self.replays]
        if not missing or self.device.type != "cuda":
            return
        programs = self.programs()
        wait_for_kernels(self.model)
        before = [(one, one.clone()) for one in self.changed_by_a_run]
        self.counts.zero_()
        try:
            wanted = [programs[key] for key in missing]
            self._before_capture(wanted)
            found = capture_graphs(self.device, *wanted, pool=self.pool)
            self.replays.update(zip(missing, found, strict=True))
        except Exception as problem:
            raise self._capture_error(problem) from problem
        finally:
            for one, value in before:
                one.copy_(value)

    @property
    def changed_by_a_run(self) -> tuple[Tensor, ...]:
        """What differs after a run with counts of 0, such as the one before a capture: the counts, and these."""
        return (self.counts,)

    def _interpret(self, which: Hashable) -> None:
        """Runs a program with interpreted kernels. An error in its first run is a CaptureError, as on a GPU."""
        wait_for_kernels(self.model)
        try:
            self.programs()[which]()
        except Exception as problem:
            if which in self._ran:
                raise
            raise self._capture_error(problem) from problem
        self._ran.add(which)

    def _capture_error(self, problem: Exception) -> CaptureError:
        reason = f"its capture failed: {_short(problem)}"
        if not isinstance(problem, torch.OutOfMemoryError):  # a later capture may find enough memory
            self.failed = reason
        return CaptureError(reason)

    def _before_capture(self, programs: Sequence[Program]) -> None:
        """Prepares what else these programs need to change nothing while they are captured."""

    def _replay(self, which: Hashable = 0) -> None:
        stream = current_stream(self.device)
        if stream != self._stream:
            raise LaminaError(
                f"a captured program that was borrowed on CUDA stream {self._stream} was run on {stream}, and nothing "
                "orders the two: run it on the first, or borrow one from model.graphs on this stream"
            )
        if self.device.type == "cuda":
            self.replays[which]()
        else:
            self._interpret(which)

    # -- tokens that `recall` reads back -----------------------------------------------------------------------------

    def room_of(self, window: Window) -> int:
        """How many tokens of a row `recall` reads back through this window."""
        if window.span is None:
            return self.room
        return window.span + (window.keep if isinstance(window, Sliding) else 0)

    @cached_property
    def recalls(self) -> bool:
        """Whether `recall` reads back whole rows, so that programs are for rows of up to `room` tokens."""
        specs = (spec for entry in self.model.specs for spec in entry.values())
        return any(type(spec) is Tokens and spec.window.span is None for spec in specs)

    def fit_room(self, tokens: int) -> None:
        """Makes `room` fit rows of this many tokens. Programs of another room are dropped: `capture` makes new ones."""
        needed = max(LEAST_ROOM, 1 << (tokens - 1).bit_length())
        if not self.recalls or needed <= self.room <= MOST_ROOM * needed:
            return
        self.room = needed
        if self._stream is not None:
            self._stream.synchronize()  # the graphs that are dropped may still run
        self.replays.clear()
        self._ran.clear()

    def _using_kernels(self) -> Any:
        self.workspace.fusions = self._fusions
        self._fusions.begin()
        return kernels.in_use(self.workspace)

    @cached_property
    def _fusions(self) -> Fusions:
        """The model's fusion plan for its modules, which kernels consult."""
        return self.model.graphs.fusion_plan(self.logits_of).bind(self.model)

    def _int_zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _bind(self, cache: Cache, *others: Tensor) -> None:
        """Copies the cache's tables and header in, unless they are those of the last pass. others: see `_place`"""
        self._serve(cache)
        self._place(cache, *others)

    def _serve(self, cache: Cache) -> None:
        """Notes that passes are over this cache, and allocates its logits; its tables are not copied in. Raises
        InputError if this kind of pass cannot read it."""
        if self._bound_cache is None or self._bound_cache() is not cache:
            kind = CacheFormat.of(cache), cache.slack, cache.dtype, cache.fetcher is None
            if kind != self._bound_kind:
                reason = self.why_not_bound(cache)
                if reason is None and kind[0] != self.format:
                    reason = f"this pass is for {kind[0].difference(self.format)}; borrow one for this cache"
                if reason is not None:
                    raise InputError(f"this cache has no captured passes: {reason}; run plain passes with cache.step")
            self._bound_cache, self._bound_kind = weakref.ref(cache), kind
            self._placed = None
        cache._kept_logits(self.model.vocab, self.model.dtype)

    def note_constants(self, cache: Cache) -> None:
        """Gives a cache with slack the constants of its recurrences, as plain passes do: rewinding needs them."""
        for (i, name), constants in self.constants.items() if cache.slack else ():
            cache.layers[i][name].constants = constants

    def why_not_bound(self, cache: Cache) -> str | None:
        """Why passes of this kind cannot read this cache; None if they can."""
        return why_not_read(cache)

    def _place(self, cache: Cache, *others: Tensor, **more: Sequence[int]) -> None:
        """Copies in where the cache is stored: its header, and a table for `counts` and for each of `others`, unless no
        tensor of the cache was reallocated since the last call. more: further inputs, which are copied in any case"""
        placed = stores_of(cache), header_of(cache)
        if placed == self._placed and not more:
            return
        self._copy_all(cache, *others, **more)
        self._placed = placed

    def _copy_all(self, cache: Cache, *others: Tensor, **more: Sequence[int]) -> None:
        """Copies in the header and tables of the cache, and further inputs, at once. others: see `_place`"""
        scores, tables = self._scores_for(cache), list[int]()
        for counts in (self.counts, *others):
            tables += tables_of(cache, counts, scores)
        self._copy_inputs(header=header_of(cache), tables=tables, **more)
        self._placed = None

    @property
    def scored(self) -> int:
        """Queries of a row that an indexer scores at a time."""
        return self.T

    def _scores_for(self, cache: Cache) -> Tensor | None:
        """Scratch for the scores of indexers with room for this cache. It is not captured: tables point to it."""
        room = score_room(cache)
        if room and (self._scores is None or self._scores.shape[-1] < room):
            self._scores = torch.empty(self.rows, self.scored, room, device=self.device)
        return self._scores


def _short(problem: Exception) -> str:
    """
    >>> _short(ValueError("first line\\nsecond"))
    'ValueError: first line'
    """
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:300]}" if lines else type(problem).__name__
