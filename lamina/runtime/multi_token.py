"""`CapturedPass`: a pass of several tokens in two CUDA graphs, one that reads the tokens and one that commits.

`CapturedStep` generates token after token and samples on the device. Here the caller decides: a pass reads up to T
tokens per row and returns the logits after each, and `commit` stores the first accepted tokens of each row, for every
kind of layer (speculative decoding, for example). One pass serves any cache, through tables that are copied in.

    with model.graphs.pass_of(2, 4, cache) as one:        # two rows, up to four tokens per row
        logits = one.read(cache, ids, counts=[4, 1])      # [2, T, vocab]
        one.commit([3, 1])                                # or one.abort()

The first graph does not change anything that is committed. It writes new tokens into slots past the end of lines, which
are unused; rings, convolutions and recurrent states are only read. Each layer's inputs stay in the memory of the first
graph. The second graph computes from them again with the accepted counts, and this time writes rings and states, and
what a cache with slack is rewound from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.cache.counts import Counts, CountsLike
from lamina.cache.ops.begin import open_captured
from lamina.cache.ops.commit import accepted_counts, device_commit
from lamina.errors import InputError
from lamina.kernels.device_guard import current
from lamina.runtime.builders import build_together
from lamina.runtime.captured import Captured
from lamina.runtime.cuda_graph import Program
from lamina.runtime.eligibility import MOST_ROWS, MOST_TOKENS
from lamina.runtime.pointers import PLAIN_FORMAT, CacheFormat

if TYPE_CHECKING:
    from lamina.model import Model


def width_for(rows: int, tokens: int) -> int:
    """T of the captured pass that reads `tokens` tokens per row: 1, 2, 4, 8 or 16, so that few shapes are captured.

    >>> width_for(2, 5)
    8
    """
    width = 1 << (tokens - 1).bit_length() if tokens > 0 else 0
    if not (1 <= width <= MOST_TOKENS and rows * width <= MOST_ROWS):
        raise InputError(
            f"{rows} rows of {tokens} tokens: captured passes have 1 to {MOST_TOKENS} tokens per row (rounded up to 1, "
            f"2, 4 …) and {MOST_ROWS} in all; give fewer, or run a plain pass with cache.step"
        )
    return width


class CapturedPass(Captured):
    """A pass of up to T tokens per row over the cache that `read` is given."""

    logits_of = "all"

    def __init__(self, model: Model, rows: int, T: int, cache_format: CacheFormat = PLAIN_FORMAT) -> None:
        super().__init__(model, rows, T, cache_format, counts=2)  # tables for reading, and for commit
        self.accepted = self._int_zeros(rows)
        self.cache: Cache | None = None  # of the open pass
        self.given: Counts | None = None  # its counts
        self.chosen: list[int] | None = None  # its rows; None: all

    # -- a pass ----------------------------------------------------------------------------------------------------

    def read(
        self,
        cache: Cache,
        ids: Tensor,  # [R, n], n up to T
        counts: CountsLike | None = None,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Opens a pass and runs it. -> logits after each token [R, n, vocab], which the next `read` overwrites

        counts   [R] how many of the n tokens are real (all when None); a row with 0 is not changed
        rows     the R rows of the cache that the ids belong to; None: all, in order
        """
        n = ids.shape[1]
        if cache.rows != self.rows or n > self.T or cache.model is not self.model:
            raise InputError(
                f"a captured pass of {self.rows} rows and up to {self.T} tokens was given {n} tokens for a cache of "
                f"{cache.rows} rows{'' if cache.model is self.model else ' that another model made'}: ask for one with "
                "model.graphs.pass_of(cache.rows, tokens, cache)"
            )
        if ids.device.type == "cpu":
            self.model.check_ids(ids, counts)
        # Padding may hold any ids, and must not index the embedding out of bounds.
        ids = ids.to(self.ids.device, torch.int64).clamp(0, self.model.vocab - 1)
        if self.cache is not None:  # the previous pass can no longer be committed
            self.cache._abort_open_pass()
        self.chosen = None if rows is None or len(rows) == self.rows else list(rows)
        index = None if self.chosen is None else on_device(self.chosen, ids.device)
        with current(self.device), cache.steady:
            self.given = open_captured(cache, self, n, self._for_all_rows(n if counts is None else counts))
            self.cache = cache
            try:
                self._bind(cache, self.accepted)
                self.fit_room(max(cache.clock.high))
                self.counts.copy_(self.given.tensor)
                if index is None:
                    self.ids[:, :n].copy_(ids)
                else:
                    self.ids[:, :n].index_copy_(0, index, ids)
                self.capture()
                self._replay(0)
            except BaseException:
                cache._abort_open_pass()
                raise
        assert self.logits is not None
        logits = self.logits[:, :n]
        return logits if index is None else logits.index_select(0, index)

    def commit(self, accepted: CountsLike | None = None) -> None:
        """Stores the first `accepted` tokens of each row that was read (all real ones when None), and closes."""
        cache, counts = self.cache, self.given
        if cache is None or counts is None or cache._open_pass is not self:
            raise InputError("this pass is closed: it was committed or aborted, or the cache was changed after reading")
        accepted = None if accepted is None else self._for_all_rows(accepted)
        with current(self.device), cache.steady:
            taken = accepted_counts(cache, range(self.rows), counts, accepted, rings=True)
            if cache.pages is not None:
                self._place(cache, self.accepted)
            self.accepted.copy_(taken.tensor)
            self.note_constants(cache)
            with device_commit(cache, taken.low, taken.high):
                self._replay(1)

    def abort(self) -> None:
        """Closes without committing: the cache is as it was before the pass."""
        self.close()

    def close(self) -> None:
        """Forgets the cache. A closed pass cannot be committed."""
        self.cache, self.given = None, None

    def _for_all_rows(self, numbers: CountsLike) -> CountsLike:
        """Expands values of the rows in this pass to all rows of the cache, with 0 for the others."""
        if self.chosen is None:
            return numbers
        own = [numbers] * len(self.chosen) if isinstance(numbers, int) else [int(number) for number in numbers]
        if len(own) != len(self.chosen):
            raise InputError(f"{len(own)} counts for the {len(self.chosen)} rows of this pass: give one for each")
        every = [0] * self.rows
        for row, number in zip(self.chosen, own, strict=True):
            every[row] = number
        return every

    # -- programs --------------------------------------------------------------------------------------------------

    def programs(self) -> Mapping[Any, Program]:
        return {0: self.read_program, 1: self.commit_program}

    def read_program(self) -> None:
        """The first graph: from ids to logits."""
        from lamina.kernels.step_ends import positions  # imports Triton

        with self._using_kernels():
            positions(self.header, self.positions, self.model.max_positions)
            self.model.forward(self.ids, self, logits="all")

    def commit_program(self) -> None:
        """The second graph: the device's part of commit. The lengths are written last, since all kernels read them."""
        from lamina.kernels.step_ends import commit_tokens  # imports Triton

        assert self.logits is not None
        with self._using_kernels():
            for entry in self.entries:
                for one in entry.values():
                    one.commit()
        commit_tokens(self.logits, self.header, self.ids, self.accepted, self.format.logs)

    def _before_capture(self, programs: Sequence[Program]) -> None:
        self.accepted.zero_()
        build_together(*programs)

    def _drop_cache(self) -> None:
        super()._drop_cache()
        if self.cache is not None:
            self.cache._abort_open_pass()
