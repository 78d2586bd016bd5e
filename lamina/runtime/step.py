"""`CapturedStep`: one decode step in one CUDA graph: every kernel of a pass, sampling of the next tokens, and commit.

A step is captured once per number of rows, sampling settings and cache format (codecs, page size), and then serves any
such cache: kernels find a cache's memory through tables of addresses, so switching to another cache, or to one that has
grown, only copies its tables in.
Rows that have ended stay in the graph with a count of 0: they are not written, and kernels of large launches do not
read them either. The cache grows between two replays, when the next tokens need room. Nothing is read back while steps
run, unless a cache must grow or a pool is short of pages.

    with graphs.step(cache.rows, chooser, cache) as step:
        step.begin(cache, ids, remaining, ends)
        step.run(n)                                    n tokens for every live row; captured at the first run
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.ops.commit import device_commit
from lamina.cache.pool.page_table import Span
from lamina.errors import CapacityError, CaptureError, InputError, LaminaError
from lamina.kernels.device_guard import current
from lamina.runtime.captured import LEAST_ROOM, Captured
from lamina.runtime.cuda_graph import Program
from lamina.runtime.pointers import PLAIN_FORMAT, CacheFormat
from lamina.sampling.exclusion import excluded
from lamina.sampling.history import RECENT, History, history_of

if TYPE_CHECKING:
    from lamina.model import Model
    from lamina.sampling.chooser import Chooser

MOST_ENDS = 8


class CapturedStep(Captured):
    """A pass of one token per row over the cache that `begin` was given, which samples and commits on the device.

    remaining, numbers, prompts   [rows]: see `begin`
    ends                          [MOST_ENDS], filled up with -1
    seed                          [1]
    """

    remaining: Tensor
    numbers: Tensor
    prompts: Tensor
    ends: Tensor
    seed: Tensor

    def __init__(self, model: Model, rows: int, chooser: Chooser, cache_format: CacheFormat = PLAIN_FORMAT) -> None:
        super().__init__(model, rows, 1, cache_format, counts=1)
        self.chooser = chooser
        self.seen: Tensor | None = None  # [rows, vocab] how often each id occurs in each row, for processors
        if chooser.processors:
            self.seen, self.seen_in_prompt = self._int_zeros(2, rows, model.vocab)
            self.recent = self._int_zeros(rows, RECENT)  # the last tokens of each row before `ids`
        self.scratch = self.scratch_for()
        self._cache: weakref.ref[Cache] | None = None  # weak, so that its owner can free it
        self._most: list[int] = []  # final length of each row, at most

    def _input_shapes(self, counts: int, entries: int) -> dict[str, tuple[int, ...]]:
        *before, ids = super()._input_shapes(counts, entries).items()
        row, more = (self.rows,), ("remaining", "numbers", "prompts")
        return dict([*before, *((name, row) for name in more), ("ends", (MOST_ENDS,)), ("seed", (1,)), ids])

    def scratch_for(self) -> Any:
        """Scratch of the kernels that choose tokens."""
        from lamina.kernels.step_ends import scratch_for  # imports Triton

        return scratch_for(self.rows, self.model.vocab, self.device)

    @property
    def how(self) -> str:
        """How it decodes, in words, for `Result.how`."""
        return "one captured graph a step"

    @property
    def cache(self) -> Cache:
        """The cache that `begin` was given last."""
        cache = None if self._cache is None else self._cache()
        if cache is None:
            raise InputError("this captured step has no cache: give it one with begin, and keep the cache alive")
        return cache

    def begin(
        self,
        cache: Cache,
        ids: Tensor,
        remaining: Iterable[int],
        ends: Iterable[int],
        *,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        prompts: Sequence[int] | None = None,
    ) -> None:
        """Sets the cache that `run` continues.

        ids        [B] the first token to feed to each row
        remaining  how many tokens each row is fed at most; 0: the row is not alive
        ends       ids that end a row
        seed       of the sampling noise
        numbers    of the rows, by which rows draw different noise
        prompts    how many tokens of each row are the prompt's, for processors
        """
        remaining, ends = list(remaining), list(ends)
        most = [high + more for high, more in zip(cache.clock.sync(), remaining, strict=True)]
        if cache.limit is not None and max(most) > cache.limit:
            raise CapacityError(
                f"{max(most)} tokens per row were requested, and the cache has room for {cache.limit}: give fewer, or "
                "make a larger cache"
            )
        cache._abort_open_pass()
        cache._kept_logits(self.model.vocab, self.model.dtype)
        self._cache, self._most = weakref.ref(cache), most
        self._make_room(cache, 1)
        self.fit_room(self._longest(cache, LEAST_ROOM))
        before = list(prompts or cache.clock.high)
        self._place(
            cache, counts=[int(more > 0) for more in remaining], remaining=remaining,
            numbers=list(numbers or range(self.rows)), prompts=before, ends=ends + [-1] * (MOST_ENDS - len(ends)),
            seed=[seed],
        )  # fmt: skip
        if self.seen is not None:
            history = history_of(cache, before)
            self.seen.copy_(history.seen(self.model.vocab))
            self.seen_in_prompt.copy_(history.seen_in_prompt(self.model.vocab))
            self.recent.copy_(history.tail(RECENT))
        self.ids.copy_(ids.reshape(-1, 1))

    def _make_room(self, cache: Cache, steps: int) -> None:
        """Makes room for the tokens of the next `steps` steps in the cache."""

        def room() -> int:
            return min(cache._room, cache.record.shape[1])

        if self._longest(cache, steps) > room():
            cache.clock.sync()  # rows that have ended need no more room
            if (needed := self._longest(cache, steps)) > room():
                cache.reserve(min(max(needed, 2 * room()), max(self._most)))

    def _longest(self, cache: Cache, steps: int) -> int:
        """The most tokens that a row may hold after the next `steps` steps."""
        return max(min(high + steps, most) for high, most in zip(cache.clock.high, self._most, strict=True))

    def _fit_longer(self, cache: Cache, steps: int) -> None:
        """Captures the step again, between two of them, if rows get too long for it. Not a CaptureError if that fails:
        tokens have been fed."""
        before = self.room
        self.fit_room(self._longest(cache, steps))
        if self.room != before:
            try:
                self.capture()
            except CaptureError as problem:
                raise LaminaError(
                    f"a step for rows of {self.room} tokens is missing, since {problem}; with model.graphs.limit = 0 "
                    "plain passes run"
                ) from problem

    def run(self, steps: int, rows: Sequence[int] | None = None) -> None:
        """Runs `steps` steps: each feeds one token to every live row and samples the next. Nothing is read back.

        rows   those that may be alive as far as the host knows (all when None): only these get pages

        Raises PagesError if the pool has no pages for a step; the steps before it are in the cache.
        """
        cache = self.cache
        with current(self.device):
            self.capture()
            while steps:
                with cache.steady:
                    self._make_room(cache, steps)
                    several = steps
                    if cache.pages is not None:
                        several = self._take_pages(cache, steps, rows)
                    self._place(cache)
                    self._fit_longer(cache, several)
                    with device_commit(cache, [0] * cache.rows, several):
                        try:
                            for _ in range(several):
                                self._replay()
                        finally:  # an interrupted run, too, may be rewound
                            self.note_constants(cache)
                steps -= several

    def _take_pages(self, cache: Cache, steps: int, rows: Sequence[int] | None) -> int:
        """Gives each row unshared pages for the slots that these steps may write. -> for how many steps they suffice

        Pages may have become shared since the last run (a fork). If pages are short, the host reads which rows are
        alive and goes step by step: a row may end before it needs another page.
        """
        pages, clock = cache.pages, cache.clock
        assert pages is not None
        live = list(range(self.rows) if rows is None else rows)

        def spans() -> list[Span]:
            return [(row, clock.low[row], min(clock.high[row] + steps, self._most[row])) for row in live]

        if pages.pool.tokens is not None and pages.runs_short(spans()):
            clock.sync()
            alive = self.counts.tolist()
            live = [row for row in live if alive[row]]
            if pages.runs_short(spans()):
                steps = 1
        pages.prepare(spans())
        return steps

    def programs(self) -> Mapping[Any, Program]:
        return {0: self.program}

    @property
    def changed_by_a_run(self) -> tuple[Tensor, ...]:
        return (self.counts,) if self.seen is None else (self.counts, self.recent)

    def program(self) -> None:
        """The captured graph: one decode step, from the ids in `self.ids` to the next ids, and commit."""
        from lamina.kernels import step_ends  # imports Triton

        with self._using_kernels():
            step_ends.positions(self.header, self.positions, self.model.max_positions)
            logits = self.model.forward(self.ids, self, logits="last")
        assert logits is not None
        scores = self.processed(logits)
        noise = (self.seed, self.numbers) if self.chooser.sample else None
        marks = (self.header, self.ids, self.counts, self.remaining, self.ends, self.scratch)
        step_ends.finish(logits, scores, noise, *marks, self.format.logs)
        self.end_excluded(scores)

    def processed(self, logits: Tensor) -> Tensor:
        """The scores that tokens are chosen from, [B, V]: the logits, or the output of processors."""
        if self.seen is None:
            return logits
        self.seen.scatter_add_(1, self.ids, self.counts[:, None])
        lengths, in_prompt = self.positions[:, 0] + 1, self.seen_in_prompt
        self.recent.copy_(torch.cat([self.recent[:, 1:], self.ids], dim=1))
        history = History(lengths, self.prompts, counts=self.seen, prompt_counts=in_prompt, recent=self.recent)
        return self.chooser.scores(logits, history)

    def end_excluded(self, scores: Tensor) -> None:
        """Ends rows whose new id is excluded, before that id is fed."""
        if self.chooser.may_exclude_all:
            self.counts.masked_fill_(excluded(scores, self.ids[:, 0]), 0)

    def _drop_cache(self) -> None:
        super()._drop_cache()
        self._cache, self._most = None, []
