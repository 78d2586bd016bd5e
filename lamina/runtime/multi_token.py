"""One pass of several tokens in two graphs: reading the tokens, and taking in those that are accepted.

`CapturedStep` makes one token after the other and chooses each by itself. Here somebody else chooses: a pass reads up
to T tokens a row and gives the logits after each, which may then be looked at in any way; `commit` takes in each row's
first so many, whatever kinds the layers are. As with a step, one pass serves any cache, by tables that are copied in.

    with model.graphs.pass_of(2, 4, cache) as one:        # of two rows, for up to four tokens
        logits = one.read(cache, ids, counts=[4, 1])      # [2, T, vocab]
        one.commit([3, 1])                                # or one.abort()

Reading leaves everything that is committed as it was. Slots past the end of a line are unused and are written at once.
Rings, convolutions and recurrent states stay: a layer remembers its inputs, which lie in the memory of the first graph,
and the second does the same work on them again with the accepted counts, this time writing what comes out.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device as to_device
from lamina.cache.counts import Counts, Numbers
from lamina.cache.ops.begin import admit
from lamina.cache.ops.commit import accepted_counts, on_device
from lamina.errors import InputError
from lamina.kernels.device_guard import current
from lamina.runtime.builders import build_together
from lamina.runtime.captured import Captured
from lamina.runtime.cuda_graph import Program, copy_in
from lamina.runtime.eligibility import MOST_ROWS, MOST_TOKENS, why_not_read
from lamina.runtime.pointers import PLAIN_FORMAT, CacheFormat, header_of

if TYPE_CHECKING:
    from lamina.model import Model


def width_for(rows: int, tokens: int) -> int:
    """The T of the captured pass that reads so many tokens a row: 1, 2, 4, 8 or 16, so that few are captured.

    >>> width_for(2, 5)
    8
    """
    width = 1 << (tokens - 1).bit_length() if tokens > 0 else 0
    if not (1 <= width <= MOST_TOKENS and rows * width <= MOST_ROWS):
        raise InputError(
            f"{rows} rows of {tokens} tokens: captured passes are of 1 to {MOST_TOKENS} tokens (rounded up to 1, 2, 4 "
            f"…) and of {MOST_ROWS} in all; give fewer, or run a plain pass with cache.step"
        )
    return width


class CapturedPass(Captured):
    """A pass of up to T tokens a row over whatever cache is given."""

    logits_of = "all"

    def __init__(self, model: Model, rows: int, T: int, cache_format: CacheFormat = PLAIN_FORMAT) -> None:
        super().__init__(model, rows, T, cache_format, counts=2)  # tables for reading, and for taking in
        self.accepted = self._numbers(rows)
        self.cache: Cache | None = None  # of the pass that is open
        self.given: Counts | None = None
        self.some: list[int] | None = None  # rows that are in it, None: all
        self._before: weakref.ref[Cache] | None = None  # whose tables were copied in last
        self._header: list[int] = []

    # -- a pass ----------------------------------------------------------------------------------------------------

    def read(
        self,
        cache: Cache,
        ids: Tensor,  # [R, n], n up to T
        counts: Numbers | None = None,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Opens a pass and runs it: the logits after each token [R, n, vocab], which the next `read` writes over.

        counts   how many of the n are real, for each row (all when None); a row with 0 takes no part
        rows     the rows of the cache that ids are for; None: all, in order
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
        # Padding may hold anything, and what is read of the embedding by it must lie inside.
        ids = ids.to(self.ids.device, torch.int64).clamp(0, self.model.vocab - 1)
        if self.cache is not None:  # what was read before is not taken in any more
            self.cache._abort_open_pass()
        self.some = None if rows is None or len(rows) == self.rows else list(rows)
        index = None if self.some is None else to_device(self.some, ids.device)
        with current(self.device), cache.steady:
            self.given = admit(cache, self, n, self._of_all(n if counts is None else counts))
            self.cache = cache
            try:
                self._take_up(cache)
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

    def commit(self, accepted: Numbers | None = None) -> None:
        """Takes in the first `accepted` tokens of each row that was read (all real ones when None)."""
        cache, counts = self.cache, self.given
        if cache is None or counts is None or cache._open_pass is not self:
            raise InputError("this pass is over: it was committed or dropped, or the cache was changed after reading")
        accepted = None if accepted is None else self._of_all(accepted)
        with current(self.device), cache.steady:
            taken = accepted_counts(cache, range(self.rows), counts, accepted, rings=True)
            if cache.pages is not None:
                self._point_at(cache, self.accepted)
            self.accepted.copy_(taken.tensor)
            with on_device(cache, taken.low, taken.high):
                self._replay(1)

    def abort(self) -> None:
        """Drops the pass: the cache is as it was before it."""
        self.close()

    def close(self) -> None:
        """Forgets the cache."""
        self.cache, self.given = None, None

    def _of_all(self, numbers: Numbers) -> Numbers:
        """Numbers of the rows in this pass as numbers of all rows."""
        if self.some is None:
            return numbers
        own = [numbers] * len(self.some) if isinstance(numbers, int) else [int(number) for number in numbers]
        if len(own) != len(self.some):
            raise InputError(f"{len(own)} numbers for the {len(self.some)} rows of this pass: give one for each")
        every = [0] * self.rows
        for row, number in zip(self.some, own, strict=True):
            every[row] = number
        return every

    # -- programs --------------------------------------------------------------------------------------------------

    def programs(self) -> tuple[Program, ...]:
        return self.reading, self.taking_in

    def reading(self) -> None:
        """From ids to logits, kernel by kernel: what the first graph holds."""
        from lamina.kernels.step_ends import positions

        with self._using_kernels():
            positions(self.header, self.positions)
            self.model.forward(self.ids, self, logits="all")

    def taking_in(self) -> None:
        """The device half of commit: what the second graph holds. Lengths, which all others read, move last."""
        from lamina.kernels.step_ends import commit_tokens

        assert self.logits is not None
        with self._using_kernels():
            for entry in self.entries:
                for one in entry.values():
                    one.commit()
        commit_tokens(self.logits, self.header, self.ids, self.accepted)

    def _before_capture(self) -> None:
        self.accepted.zero_()
        build_together(*self.programs())

    def _take_up(self, cache: Cache) -> None:
        """Copies the cache's tables in, where they are not those of the last pass."""
        if self._before is None or self._before() is not cache:
            reason = why_not_read(cache)
            if reason is None and CacheFormat.of(cache) != self.format:
                reason = "this pass reads other codecs or pages; model.graphs.pass_of takes the cache"
            if reason is not None:
                raise InputError(f"this cache has no captured passes: {reason}; run plain passes with cache.step")
            self._before = weakref.ref(cache)
            self._stores = []
        cache._kept_logits(self.model.vocab, self.model.dtype)
        self._point_at(cache, self.accepted)
        header = header_of(cache)
        if header != self._header:
            copy_in(self.header, header)
            self._header = header

    def _forget(self) -> None:
        super()._forget()
        if self.cache is not None:
            self.cache._abort_open_pass()
        self._before, self._header = None, []
