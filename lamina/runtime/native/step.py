"""`NativeStep`: one decode step as a native program on a CPU: a pass, the choice of the next tokens, and commit.

It is a `CapturedStep` in every way but how it runs: the pass is recorded once (`lamina.native.recorder`) as kernels
with their pointers and sizes, and a replay is one call of native code. Kernels find the cache through the same tables.
Processors of scores run in PyTorch, between the two halves of the program.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina import kernels
from lamina.native.arguments import STRETCH, TYPES, ChooseArgs, CommitArgs, PositionsArgs, pointer
from lamina.native.operations import NativeRecorder
from lamina.native.program import Program
from lamina.runtime.native.backend import NATIVE
from lamina.runtime.step import CapturedStep
from lamina.weights.quantize import INT8

if TYPE_CHECKING:
    from lamina.cache.backend import Backend

LAST = (1 << 31) - 1


class NativeStep(CapturedStep):
    """
    forward    the program from the ids to the logits; with greedy choice and without processors also what follows
    finish     choice and commit, if processors come between
    """

    backend: Backend = NATIVE
    _recorder: NativeRecorder | None = None
    _recorded_room = 0  # `room` of the recorded program

    def scratch_for(self) -> tuple[Tensor, Tensor]:
        parts = -(-self.model.vocab // STRETCH)
        return torch.zeros(self.rows, parts), torch.zeros(self.rows, parts, dtype=torch.int64)

    @property
    def how(self) -> str:
        """In words, for `Result.how`."""
        calls = [name.removeprefix("torch:") for name in self._forward.names if name.startswith("torch:")]
        rest = f" ({len(calls)} of its {len(self._forward)} operations by PyTorch)" if calls else ""
        return f"one native program a step{rest}"

    def capture(self, *which: Hashable) -> None:
        """Records the program, unless that is done, or again if a constant that it was computed from or
        `model.activations` has changed, or if rows have got too long for it."""
        found, integer = self._recorder, self.model.activations == INT8
        if found is None or found.is_stale or found.integer != integer or self._recorded_room != self.room:
            try:
                self._record()
            except Exception as problem:
                raise self._capture_error(problem) from problem

    def _record(self) -> None:
        self._recorded_room, self.constants = self.room, {}
        inputs = [self.ids, self.positions, self.counts, self.tables, self.header]
        forward = Program()
        recorder = NativeRecorder(forward, inputs, self.model.activations == INT8)
        with torch.no_grad(), kernels.in_use(None, recorder), recorder:
            last = LAST if self.model.max_positions is None else self.model.max_positions - 1
            positions = PositionsArgs(
                header=self.header.data_ptr(), out=self.positions.data_ptr(), rows=self.rows, last=last
            )
            recorder.add("positions", positions, self.header, self.positions, work=0)
            logits = self.model.forward(self.ids, self, logits="last")
            assert logits is not None
            logits = logits.float().contiguous()
        self._recorder, self._forward, self._logits = recorder, forward, logits
        self._chosen_from = logits if self.seen is None else torch.zeros_like(logits)
        self._finish = forward if self.seen is None else Program()
        self._add_finish(self._finish, logits, self._chosen_from)

    def _add_finish(self, program: Program, logits: Tensor, scores: Tensor) -> None:
        """Appends the choice of the next tokens and commit."""
        (best, where), header, sample = self.scratch, self.header, self.chooser.sample
        (rows, vocab), parts = logits.shape, best.shape[1]
        choose = ChooseArgs(
            logits=logits.data_ptr(), scores=scores.data_ptr(), header=header.data_ptr(),
            counts=self.counts.data_ptr(), seed=pointer(self.seed if sample else None),
            numbers=pointer(self.numbers if sample else None), best=best.data_ptr(), where=where.data_ptr(),
            rows=rows, vocab=vocab, logits_type=TYPES[self.model.dtype], parts=parts,
        )  # fmt: skip
        program.add(
            "choose",
            choose,
            [logits, scores, header, best, where, self.counts, self.seed, self.numbers],
            serial=parts == 1,
        )
        commit = CommitArgs(
            best=best.data_ptr(), where=where.data_ptr(), header=header.data_ptr(), ids=self.ids.data_ptr(),
            counts=self.counts.data_ptr(), left=self.remaining.data_ptr(), ends=self.ends.data_ptr(), rows=rows,
            parts=parts, ends_count=len(self.ends),
        )  # fmt: skip
        program.add("commit", commit, [self.ids, self.remaining, self.ends], serial=True)

    def _replay(self, which: Hashable = 0) -> None:
        if not self.counts.any():  # every row has ended
            return
        self._forward.run()
        if self._finish is not self._forward:
            self._chosen_from.copy_(self.processed(self._logits))
            self._finish.run()
        self.end_excluded(self._chosen_from)
