"""`NativeStep`: one decode step as a native program on a CPU: a pass, the choice of the next tokens, and commit.

It is a `CapturedStep` in every way but how it runs: the pass is recorded once (`lamina.native.recorder`) as kernels
with their pointers and sizes, and a replay is one call of native code. Kernels find the cache through the same tables.
Processors of scores run in PyTorch, between the two halves of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.window import Sliding, Window
from lamina.errors import LaminaError
from lamina.native.arguments import STRETCH, TYPES, ChooseArgs, CommitArgs, PositionsArgs, pointer
from lamina.native.operations import NativeRecorder
from lamina.native.program import Program
from lamina.runtime.native.backend import NATIVE
from lamina.runtime.step import CapturedStep
from lamina.weights.quantize import INT8

if TYPE_CHECKING:
    from lamina.cache.backend import Backend
    from lamina.cache.cache import Cache

LAST = (1 << 31) - 1
LEAST_ROOM, MOST_ROOM = 64, 8  # tokens; times the room that is needed, above which a program is recorded again


class NativeStep(CapturedStep):
    """
    forward    the program from the ids to the logits; with greedy choice and without processors also what follows
    finish     choice and commit, if processors come between
    room       tokens of a row that a program recorded now can read back as tensors (`recall`), a power of two
    """

    backend: Backend = NATIVE
    room = LEAST_ROOM
    _recorder: NativeRecorder | None = None
    _room_used: int | None = None  # the room of the recorded program; None: it fits rows of any length

    def room_of(self, window: Window) -> int:
        """How many tokens of a row `recall` reads back through this window, in the program that is being recorded."""
        if window.span is None:
            self._room_used = self.room
            return self.room
        return window.span + (window.keep if isinstance(window, Sliding) else 0)

    def scratch_for(self) -> tuple[Tensor, Tensor]:
        parts = -(-self.model.vocab // STRETCH)
        return torch.zeros(self.rows, parts), torch.zeros(self.rows, parts, dtype=torch.int64)

    @property
    def how(self) -> str:
        """In words, for `Result.how`."""
        calls = [name.removeprefix("torch:") for name in self._forward.names if name.startswith("torch:")]
        rest = f" ({len(calls)} of its {len(self._forward)} operations by PyTorch)" if calls else ""
        return f"one native program a step{rest}"

    def capture(self, *which: int) -> None:
        """Records the program, unless that is done, or again if a constant that it was computed from or
        `model.activations` has changed, or if rows have got too long for it."""
        found, integer = self._recorder, self.model.activations == INT8
        if found is None or found.is_stale or found.integer != integer or not self._fits:
            try:
                self._record()
            except Exception as problem:
                raise self._capture_error(problem) from problem

    @property
    def _fits(self) -> bool:
        """Whether the recorded program has room for the rows, and not so much that most of its work is in vain."""
        return self._room_used is None or self.room <= self._room_used <= MOST_ROOM * self.room

    def _make_room(self, cache: Cache, steps: int) -> None:
        super()._make_room(cache, steps)
        longest = max(min(high + steps, most) for high, most in zip(cache.clock.high, self._most, strict=True))
        self.room = max(LEAST_ROOM, 1 << (longest - 1).bit_length())

    def _record(self) -> None:
        self._room_used, self.constants = None, {}
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

    def _record_longer(self) -> None:
        """Records the program again between two steps, for longer rows. Not a CaptureError: tokens have been fed."""
        try:
            self._record()
        except Exception as problem:
            raise LaminaError(
                f"a native step cannot be recorded again for rows of {self.room} tokens: {problem}; LAMINA_NATIVE=0 "
                "runs plain passes"
            ) from problem

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

    def _replay(self, which: int = 0) -> None:
        if not self.counts.any():  # every row has ended
            return
        if not self._fits:
            self._record_longer()
        self._forward.run()
        if self._finish is not self._forward:
            self._chosen_from.copy_(self.processed(self._logits))
            self._finish.run()
        self.end_excluded(self._chosen_from)
