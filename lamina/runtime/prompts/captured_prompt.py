"""`CapturedPrompt`: a prompt of up to 512 tokens per row in one CUDA graph, which reads and commits.

A plain pass launches 700 to 5,000 kernels from Python, which takes longer than a short prompt computes. Here the host
copies ids and counts and launches one graph:

    with model.graphs.prompt_of(cache.rows, cache) as one:
        one.feed(cache, ids, counts=[300, 120])          # stored; the logits after each row are in cache.logits

Graphs are captured for a few numbers of tokens (`WIDTHS`), and counts do the rest: a prompt of 300 tokens runs as one
of 384. They serve any cache of their format, new or continued, through tables (`Captured`). Inside, modules run as in a
plain pass on a GPU, so products are those of cuBLAS; only the memory calls are others (`table_backend.py`). All tokens
that are read are committed, so one graph does both: lines are written before they are read, rings and the clock at the
end. The graphs of all widths share their memory, since the borrower runs one at a time.

Capturing a width takes as long as a few plain passes, so `feed` is for widths that are asked for again: see `wants`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from lamina import kernels
from lamina.attention.rotary import RopeTable, rotate
from lamina.cache.cache import Cache
from lamina.cache.counts import Counts, CountsLike
from lamina.cache.ops.begin import open_captured
from lamina.cache.ops.commit import device_commit
from lamina.errors import InputError
from lamina.inputs import all_known
from lamina.kernels.device_guard import current
from lamina.runtime.builders import build_together, wait_for_kernels
from lamina.runtime.captured import Captured
from lamina.runtime.cuda_graph import Program
from lamina.runtime.pointers import PLAIN_FORMAT, CacheFormat
from lamina.runtime.prompts.eligibility import MOST_IN_ALL, WIDTHS, why_not_prompted
from lamina.runtime.prompts.table_backend import PROMPT_TABLES

if TYPE_CHECKING:
    from lamina.cache.layers.base import Key
    from lamina.model import Model
    from lamina.recurrence.rule import Tensors

MOST_SCORED = 64, 256  # queries of a row, and of all, that an indexer scores at a time
FIRST_USE = 2  # a width is captured when it is asked for this often


def widths_for(rows: int) -> tuple[int, ...]:
    """The numbers of tokens per row for which graphs of `rows` rows are captured; none for too many rows.

    >>> widths_for(1)[-1], widths_for(8)[-1], widths_for(100)
    (512, 256, ())
    """
    return tuple(width for width in WIDTHS if rows * width <= MOST_IN_ALL)


class CapturedPrompt(Captured):
    """A pass of up to `widths[-1]` tokens per row over the cache that `feed` is given, which commits on the device."""

    backend = PROMPT_TABLES

    def __init__(self, model: Model, rows: int, cache_format: CacheFormat = PLAIN_FORMAT) -> None:
        self.widths = widths_for(rows)
        super().__init__(model, rows, max(self.widths, default=1), cache_format, counts=1)
        self.uses: Counter[int] = Counter()
        self._constants: dict[int, dict[Key, Tensors]] = {}  # width -> `constants` of its graph
        self._all_ids, self._all_positions = self.ids.flatten(), self.positions.flatten()
        if self.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()

    @property
    def scored(self) -> int:
        of_row, of_all = MOST_SCORED
        return min(of_row, max(of_all // self.rows, 1))

    @property
    def captures(self) -> int:
        """How many widths were captured so far, or run, where kernels are interpreted."""
        return len(self.replays) + len(self._ran)

    def width_of(self, tokens: int) -> int | None:
        """The number of tokens per row of the graph that reads `tokens` tokens; None if that is too many."""
        return next((width for width in self.widths if tokens <= width), None)

    def wants(self, tokens: int) -> bool:
        """Notes that a prompt of this many tokens per row is to be read. -> whether to read it here, since its width is
        captured, or was asked for before: capturing for a single prompt would take longer than it saves."""
        width = self.width_of(tokens)
        if width is None:
            return False
        self.uses[width] += 1
        return self.uses[width] >= FIRST_USE

    # -- a pass ----------------------------------------------------------------------------------------------------

    def feed(
        self,
        cache: Cache,
        ids: Tensor,  # [rows, n]
        counts: CountsLike | None = None,
    ) -> None:
        """Reads and commits tokens. The cache keeps the logits after each row's last token.

        counts   [rows] how many of the n tokens are real (all when None); a row with 0 is not changed

        Raises CaptureError before anything is fed if the graph cannot be captured.
        """
        n = ids.shape[1]
        width = self.width_of(n)
        if cache.rows != self.rows or width is None or cache.model is not self.model:
            raise InputError(
                f"a captured prompt of {self.rows} rows and up to {max(self.widths, default=0)} tokens was given {n} "
                f"tokens for a cache of {cache.rows} rows{'' if cache.model is self.model else ' of another model'}: "
                "run a plain pass, model(ids, cache=cache)"
            )
        if ids.device.type != "cpu" or not all_known(ids, self.model.vocab):
            if ids.device.type == "cpu":
                self.model.check_ids(ids, counts)
            ids = ids.clamp(0, self.model.vocab - 1)  # padding may hold any
        self._select(width)
        with current(self.device), cache.steady:
            given = open_captured(cache, self, n, n if counts is None else counts)
            try:
                self._serve(cache)
                self._place_all(cache, given, ids)
                self.fit_room(max(cache.clock.high))
                self.capture(self.widths.index(width))
            except BaseException:
                cache._abort_open_pass()
                raise
            self.note_constants(cache)
            with device_commit(cache, given.low, given.high):
                self._replay(self.widths.index(width))

    def _place_all(self, cache: Cache, given: Counts, ids: Tensor) -> None:
        """Copies in where the cache is stored, the counts and ids [rows, n]: at once, as far as the host knows them."""
        n, known = ids.shape[1], ids.device.type == "cpu"
        inputs = {"counts": given.high}
        if known:
            wide = ids if self.rows == 1 or n == self.T else functional.pad(ids, (0, self.T - n))
            inputs["ids"] = wide.flatten().tolist()
        self._place(cache, **inputs)
        if not given.exact:
            self.counts.copy_(given.tensor)
        if not known:
            self.ids[:, :n].copy_(ids)

    def prepare(self, cache: Cache) -> None:
        """Captures all widths now, so that no prompt waits for it. The cache is not changed."""
        with current(self.device), cache.steady:
            self._bind(cache)
            for i in reversed(range(len(self.widths))):  # the largest first: the others fit its memory
                self.capture(i)
        self.uses.update(dict.fromkeys(self.widths, FIRST_USE))

    def commit(self, accepted: CountsLike | None = None) -> None:
        raise InputError("a captured prompt commits all its tokens itself")

    def abort(self) -> None:
        """Closes: nothing was fed."""

    def close(self) -> None:
        """Holds nothing of the pass."""

    def rotated(self, x: Tensor, rope: RopeTable) -> Tensor:
        return rotate(x, rope)

    # -- programs --------------------------------------------------------------------------------------------------

    def programs(self) -> tuple[Program, ...]:
        return tuple(partial(self.program, width) for width in self.widths)

    @torch.no_grad()
    def program(self, width: int) -> None:
        """The graph: from ids to logits, and the device's part of commit. The lengths are written last, since all
        kernels read them."""
        from lamina.kernels.step_ends import commit_tokens, positions  # imports Triton

        self._select(width)
        with kernels.in_workspace(self.workspace):
            positions(self.header, self.positions, self.model.max_positions)
            self.valid = torch.arange(width, device=self.device) < self.counts[:, None]
            logits = self.model.forward(self.ids, self, logits="last")
            assert logits is not None
            for entry in self.entries:
                for one in entry.values():
                    one.commit()
            commit_tokens(logits, self.header, self.ids, self.counts, self.format.logs)
        self._forget()

    def capture(self, *which: int) -> None:
        super().capture(*which)
        if self.device.type != "cuda":  # what cannot run is found before a token is fed, as on a GPU
            counts = self.counts.clone()
            self.counts.zero_()
            for i in set(which) - self._ran:
                self._interpret(i)
            self.counts.copy_(counts)

    def _before_capture(self, programs: Sequence[Program]) -> None:
        wait_for_kernels(self.model, prompts=True)
        build_together(*programs)  # kernels are built many at a time; in the program they would be one by one

    def why_not_bound(self, cache: Cache) -> str | None:
        return why_not_prompted(cache)

    def _select(self, width: int) -> None:
        """Makes `ids` and `positions` those of this width: [rows, width], at the beginning of the memory of all."""
        self.T, size, self.constants = width, self.rows * width, self._constants.setdefault(width, {})
        self.ids, self.positions = (x[:size].view(self.rows, width) for x in (self._all_ids, self._all_positions))

    def _forget(self) -> None:
        """Drops the tensors of a pass: another graph uses their memory."""
        self.logits, self.valid = None, None
        for entry in self.entries:
            for one in entry.values():
                one.at_commit, one.new = None, None
