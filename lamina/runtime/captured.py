"""What a captured step and a captured pass have in common.

Both stand where a `Step` stands in model code, and find the cache that they are given through tables of pointers that
are copied in. Each has memory of its own: inputs, tables and the workspace of its kernels. So each serves one caller at
a time (`lamina.runtime.graphs` lends them), on the CUDA stream on which it was borrowed.

Without CUDA (kernels interpreted on the CPU) a replay runs the program again, which is how all of this is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from lamina import kernels
from lamina.cache.cache import Cache
from lamina.cache.memory import Memory
from lamina.errors import CaptureError, LaminaError
from lamina.kernels.columns import HEADER, WIDTH
from lamina.runtime.builders import wait_for_kernels
from lamina.runtime.cuda_graph import Program, copy_in, current_stream, recorded
from lamina.runtime.kernel_backend import KERNELS, KernelBackend, TableEntry
from lamina.runtime.pointers import CacheFormat, entries_of, stores_of, tables_of

if TYPE_CHECKING:
    from lamina.kernels.gemm.fusion import Fusions
    from lamina.model import Model


class Captured:
    """T tokens per row of any cache of the model that has this number of rows and this format. A `Pass`.

    tables   [kinds of counts, entries, columns] the cache's entries, once with the counts of the pass and, where a
             second graph commits, once with the accepted counts
    """

    backend: KernelBackend = KERNELS
    valid: Tensor | None = None  # kernels leave out padding by the counts
    logits_of: Literal["last", "all"] = "last"  # the tokens whose logits a program computes

    def __init__(self, model: Model, rows: int, T: int, cache_format: CacheFormat, counts: int) -> None:
        from lamina.kernels.workspace import Workspace

        entries = sum(len(entry) for entry in model.specs)
        self.model, self.rows, self.T, self.format = model, rows, T, cache_format
        self.device = model.device
        self.workspace = Workspace(self.device)
        self.tables, self.header = self._numbers(counts, entries, WIDTH), self._numbers(len(HEADER))
        self.positions, self.ids = self._numbers(rows, T), self._numbers(rows, T)
        self.counts = self.all_counts = self._numbers(rows)
        later = self.tables[1] if counts > 1 else None
        self.entries: list[dict[str, TableEntry]] = entries_of(model, self.tables[0], later, cache_format)
        self.logits: Tensor | None = None
        self.hidden: dict[int, Tensor] = {}
        self.replays: list[Program] = []  # one for each program, once they are captured
        self.failed: str | None = None  # why they cannot be captured
        self._proved: set[int] = set()  # programs that ran once, where kernels are interpreted
        self._stores: list[tuple[int, int]] = []
        self._stream = current_stream(self.device)  # that it is launched on
        self._done: torch.cuda.Event | None = None  # the end of what its last borrower launched
        self._give_back: Callable[[Any], None] | None = None

    def memory(self, i: int) -> Memory:
        return Memory(self, i, self.entries[i])

    def has_run(self, ids: Tensor | None) -> None:
        """The ids are in `self.ids` already."""

    # -- one borrower at a time --------------------------------------------------------------------------------------

    def lend(self, give_back: Callable[[Any], None]) -> Self:
        """Begins a loan: launches go to the caller's current stream, behind those of the borrower before."""
        self._give_back, self._stream = give_back, current_stream(self.device)
        if self._stream is not None and self._done is not None:
            self._stream.wait_event(self._done)
        return self

    def release(self) -> None:
        """Ends the loan, so that another caller can have it; nothing happens where it has ended."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            self._forget()
            if self._stream is not None:
                self._done = self._stream.record_event()
            give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _forget(self) -> None:
        """Drops what belongs to the borrower."""
        self._stores = []

    # -- programs ----------------------------------------------------------------------------------------------------

    def programs(self) -> tuple[Program, ...]:
        """What is captured, each in a graph of its own."""
        raise TypeError(f"{type(self).__name__} names no programs")

    def capture(self) -> None:
        """Captures the programs, if that is not done. The tables must point at a cache; nothing of it changes, since no
        row takes part. Where a kernel cannot be built or launched it raises CaptureError."""
        if self.replays or self.device.type != "cuda":
            return
        wait_for_kernels(self.model)
        counts = self.counts.clone()
        self.counts.zero_()
        try:
            self._before_capture()
            self.replays = recorded(self.device, *self.programs())
        except Exception as problem:
            raise self._not_captured(problem) from problem
        finally:
            self.counts.copy_(counts)

    def _interpret(self, which: int) -> None:
        """Runs a program where kernels are interpreted; its first run shows what cannot be launched."""
        wait_for_kernels(self.model)
        try:
            self.programs()[which]()
        except Exception as problem:
            if which in self._proved:
                raise
            raise self._not_captured(problem) from problem
        self._proved.add(which)

    def _not_captured(self, problem: Exception) -> CaptureError:
        reason = f"its capture failed: {_short(problem)}"
        if not isinstance(problem, torch.OutOfMemoryError):  # there may be memory another time
            self.failed = reason
        return CaptureError(reason)

    def _before_capture(self) -> None:
        """What else must be so that a program changes nothing."""

    def _replay(self, which: int = 0) -> None:
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

    def _using_kernels(self) -> Any:
        self.workspace.fusions = self._fusions
        self._fusions.begin()
        return kernels.in_use(self.workspace)

    @cached_property
    def _fusions(self) -> Fusions:
        """The model's fusion plan for its modules, which kernels consult."""
        return self.model.graphs.fusion_plan(self.logits_of).bind(self.model)

    def _numbers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _point_at(self, cache: Cache, *others: Tensor) -> bool:
        """Copies the cache's tables in, with `counts` and with others, if anything moved since the last time; -> so."""
        stores = stores_of(cache)
        if stores == self._stores:
            return False
        tables: Sequence[Any] = [tables_of(cache, counts) for counts in (self.counts, *others)]
        copy_in(self.tables, tables)
        self._stores = stores
        return True


def _short(problem: Exception) -> str:
    """
    >>> _short(ValueError("first line\\nsecond"))
    'ValueError: first line'
    """
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:300]}" if lines else type(problem).__name__
