"""One decode step in one graph: every kernel of a pass, the choice of the next tokens and the commit, replayed as one.

A step is captured once for a number of rows, a way of choosing tokens and a way of writing them (codecs, pages), and
then serves any such cache: kernels find a cache's memory through tables of pointers, and taking up another cache, or
one that has grown, is copying its tables in.
Rows that have ended stay in the graph with a count of 0: nothing of theirs is written, and kernels of large launches do
not read it either. Nothing is read back while steps run, unless a pool is short of pages.

    step = graphs.step(cache.rows, chooser, cache)     captured at the first run
    step.take_up(cache, ids, left, ends)
    step.run(n)                                        n tokens for every live row

Without CUDA (kernels interpreted on the CPU) a replay runs the same program again, which is how this file is tested.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lamina import kernels
from lamina.cache.cache import Cache
from lamina.cache.holding import Span
from lamina.runtime.captured import Captured
from lamina.runtime.passes import CapturedPass, width_for
from lamina.runtime.recording import copy_in, recorded
from lamina.runtime.rehearse import wait_for_kernels
from lamina.runtime.tables import PLAINLY, Written, header_of

if TYPE_CHECKING:
    from lamina.generation.run import Chooser
    from lamina.model import Model

MOST_GRAPHS = 8  # of a model; the least recently used goes first
MOST_ENDS = 8


class CapturedStep(Captured):
    """A pass of one token a row over whatever cache it has taken up."""

    def __init__(self, model: Model, rows: int, chooser: Chooser, written: Written = PLAINLY) -> None:
        from lamina.kernels.step import scratch_for

        super().__init__(model, rows, 1, written, counts=1)
        self.chooser = chooser
        self.left, self.ends, self.seed = self._numbers(rows), self._numbers(MOST_ENDS), self._numbers(1)
        self.numbers, self.prompts = self._numbers(rows), self._numbers(rows)
        self.seen: Tensor | None = None  # how often each id occurs in each row, for processors
        if chooser.processors:
            self.seen, self.seen_in_prompt = self._numbers(2, rows, model.vocab)
        self.scratch = scratch_for(rows, model.vocab, model.device)
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._cache: weakref.ref[Cache] | None = None  # its owner may drop it, and what it holds
        self._most: list[int] = []  # tokens that each row may hold in the end

    @property
    def cache(self) -> Cache:
        """The one that was taken up last."""
        cache = None if self._cache is None else self._cache()
        assert cache is not None, "a captured step goes on with a cache that was taken up and is still there"
        return cache

    def take_up(
        self,
        cache: Cache,
        ids: Tensor,
        left: Iterable[int],
        ends: Iterable[int],
        *,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        prompts: Sequence[int] | None = None,
    ) -> None:
        """Makes this cache the one that `run` goes on with: feed `ids` [B] first, make `left` tokens a row at most.

        seed, numbers   of the noise, where tokens are drawn; rows have their own numbers
        prompts         how many tokens of each row are the prompt's, for processors
        """
        from lamina.generation.history import history_of

        left, ends = list(left), list(ends)
        cache.drop_open_step()
        cache.logits_kept(self.model.vocab, self.model.dtype)
        self._cache, self._stores = weakref.ref(cache), []
        self._most = self._made_at_most(cache, left)
        self._point_at(cache)
        copy_in(self.header, header_of(cache))
        copy_in(self.ends, ends + [-1] * (MOST_ENDS - len(ends)))
        copy_in(self.left, left)
        copy_in(self.seed, [seed])
        copy_in(self.numbers, list(numbers or range(self.rows)))
        if self.seen is not None:
            before = list(prompts or cache.clock.high)
            copy_in(self.prompts, before)
            history = history_of(cache, before)
            self.seen.copy_(history.seen(self.model.vocab))
            self.seen_in_prompt.copy_(history.seen_in_prompt(self.model.vocab))
        self.ids.copy_(ids.reshape(-1, 1))
        self.counts.copy_(self.left > 0)

    @staticmethod
    def _made_at_most(cache: Cache, left: Sequence[int]) -> list[int]:
        """How many tokens each row may hold in the end; the cache has room for them."""

        def most() -> list[int]:
            return [high + more for high, more in zip(cache.clock.high, left, strict=True)]

        if max(most()) > min(cache._room, cache.record.shape[1]):
            cache.clock.sync()
            cache.reserve(max(most()))
        return most()

    def run(self, steps: int, rows: Sequence[int] | None = None) -> None:
        """Feeds and makes `steps` tokens for every live row; nothing is read back.

        rows   those that may be alive as far as the host knows (all when None): no others get pages
        Where there are no pages for more, it raises PagesError; what was made before is in the cache.
        """
        cache = self.cache
        if self.graph is None:
            wait_for_kernels(self.model)
            if self.ids.is_cuda:
                self._capture()
        while steps:
            several = steps if cache.pages is None else self._provided(cache, steps, rows)
            for _ in range(several):
                if self.graph is None:
                    self.program()
                else:
                    self.graph.replay()
            cache.clock.drift(several)
            steps -= several

    def _provided(self, cache: Cache, steps: int, rows: Sequence[int] | None) -> int:
        """Gives rows the pages that these steps may write, each its own; -> for how many of the steps there are some.

        Somebody may have shared pages since the last run. Short of pages, steps are taken one by one, by what the
        device knows: a row may end before it needs another page.
        """
        pages, clock = cache.pages, cache.clock
        assert pages is not None
        live = list(range(self.rows) if rows is None else rows)

        def spans() -> list[Span]:
            return [(row, clock.low[row], min(clock.high[row] + steps, self._most[row])) for row in live]

        if pages.pool.tokens is not None and pages.lack(spans()):
            clock.sync()
            alive = self.counts.tolist()
            live = [row for row in live if alive[row]]
            if pages.lack(spans()):
                steps = 1
        pages.prepare(spans())
        self._point_at(cache)  # a pool that grows lies elsewhere then
        return steps

    def program(self) -> None:
        """One step, kernel by kernel: what is captured."""
        from lamina.generation.history import History
        from lamina.kernels import step as ends_of_step

        ends_of_step.positions(self.header, self.positions)
        with kernels.in_use():
            logits = self.model.forward(self.ids, self, logits="last")  # type: ignore[arg-type]
        assert logits is not None
        scores = logits
        if self.seen is not None:
            self.seen.scatter_add_(1, self.ids, self.counts[:, None])
            lengths, in_prompt = self.positions[:, 0] + 1, self.seen_in_prompt
            history = History(lengths, self.prompts, counts=self.seen, prompt_counts=in_prompt)
            scores = self.chooser.scores(logits, history)
        noise = (self.seed, self.numbers) if self.chooser.sample else None
        marks = (self.header, self.ids, self.counts, self.left, self.ends, self.scratch)
        ends_of_step.finish(logits, scores, noise, *marks)

    def _capture(self) -> None:
        """Runs once with no row alive, so that kernels are built and nothing changes, then records."""
        alive = self.counts.clone()
        self.counts.zero_()
        (self.graph,) = recorded(self.program)
        self.counts.copy_(alive)


class Graphs:
    """The captured steps of a model, one for each number of rows, way of choosing and of writing, and its captured
    passes, one for each number of rows, of tokens and way of writing; `captures` counts them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.captures = 0
        self.kept: OrderedDict[Hashable, Any] = OrderedDict()
        self.weights: list[int] = []

    def step(self, rows: int, chooser: Chooser, cache: Cache | None = None) -> CapturedStep:
        """The step for caches that are written as this one is; as they come where there is none."""
        chooser = replace(chooser, seed=0)  # seeds are copied in
        written = Written.like(cache)
        return self._kept((rows, chooser, written), lambda: CapturedStep(self.model, rows, chooser, written))

    def pass_of(self, rows: int, tokens: int, cache: Cache | None = None) -> CapturedPass:
        """The captured pass that reads up to so many tokens a row of caches that are written as this one is."""
        T, written = width_for(rows, tokens), Written.like(cache)
        return self._kept((rows, T, written), lambda: CapturedPass(self.model, rows, T, written))

    def _kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        weights = list(addresses(self.model))
        if weights != self.weights:  # the model was moved or converted: what was captured reads memory it has left
            self.kept.clear()
            self.weights = weights
        if key not in self.kept:
            self.kept[key] = make()
            self.captures += 1
            if len(self.kept) > MOST_GRAPHS:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return self.kept[key]


def addresses(module: nn.Module) -> Iterator[int]:
    """Where the weights lie. `module.parameters()` takes ten times as long, for names that nobody asked for."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter.data_ptr()
    for child in module._modules.values():
        if child is not None:
            yield from addresses(child)
