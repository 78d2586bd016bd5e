"""`CapturedPrompt`: a prompt of up to 512 tokens per row in one CUDA graph, which reads and commits.

A plain pass launches 700 to 5,000 kernels from Python, which takes longer than a short prompt computes. Here the host
copies ids and counts and launches one graph:

    with model.graphs.prompt_of(cache.rows, cache) as one:
        one.feed(cache, ids, counts=[300, 120])          # stored; the logits after each row are in cache.logits

Graphs are captured for a few numbers of tokens (`WIDTHS`), and counts do the rest: a prompt of 300 tokens runs as one
of 384. They serve any cache of their format, new or continued, through tables (`Captured`). Inside, modules run as in a
plain pass on a GPU, so products are those of cuBLAS; only the memory calls are others (`table_backend.py`). All tokens
that are read are committed, so one graph does both: lines are written before they are read, rings and the clock at the
end. The graphs of all variants share their memory, since the borrower runs one at a time.

Capturing a variant takes as long as a few plain passes, so `feed` is for those that are asked for again: see `wants`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

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
FIRST_USE = 2  # a variant is captured when it is asked for this often


class Variant(NamedTuple):
    """A graph of a captured prompt.

    width      tokens per row
    embedded   reads embeddings instead of ids
    states     leaves the hidden states after the last block, from which log-probabilities are computed
    """

    width: int
    embedded: bool = False
    states: bool = False


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
        self.uses: Counter[Variant] = Counter()
        self.embeds: Tensor | None = None  # [rows, T, width], of an embedded variant
        self.states: dict[Variant, Tensor] = {}  # [rows, T, width] that a variant with states leaves
        self._constants: dict[Variant, dict[Key, Tensors]] = {}  # variant -> `constants` of its graph
        self._all_ids, self._all_positions = self.ids.flatten(), self.positions.flatten()
        self._all_embeds: Tensor | None = None
        if self.device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()

    @property
    def scored(self) -> int:
        of_row, of_all = MOST_SCORED
        return min(of_row, max(of_all // self.rows, 1))

    @property
    def captures(self) -> int:
        """How many variants were captured so far, or run, where kernels are interpreted."""
        return len(self.replays) + len(self._ran)

    def width_of(self, tokens: int) -> int | None:
        """The number of tokens per row of the graph that reads `tokens` tokens; None if that is too many."""
        return next((width for width in self.widths if tokens <= width), None)

    def wants(self, tokens: int, *, embedded: bool = False, states: bool = False) -> bool:
        """Notes that a prompt of this many tokens per row is to be read. -> whether to read it here, since its variant
        is captured, or was asked for before: capturing for a single prompt would take longer than it saves."""
        width = self.width_of(tokens)
        if width is None:
            return False
        variant = Variant(width, embedded, states)
        self.uses[variant] += 1
        return self.uses[variant] >= FIRST_USE

    # -- a pass ----------------------------------------------------------------------------------------------------

    def feed(
        self,
        cache: Cache,
        ids: Tensor | None,  # [rows, n]
        counts: CountsLike | None = None,
        *,
        embeds: Tensor | None = None,  # [rows, n, width], instead of ids
        states: bool = False,
    ) -> Tensor | None:
        """Reads and commits tokens. The cache keeps the logits after each row's last token. -> with `states`, the
        hidden states after the last block, [rows, n or more, width], which the next call overwrites

        counts   [rows] how many of the n tokens are real (all when None); a row with 0 is not changed

        Raises CaptureError before anything is fed if the graph cannot be captured.
        """
        given = ids if embeds is None else embeds
        if given is None or (ids is not None and embeds is not None):
            raise InputError("give either ids or embeds")
        n = given.shape[1]
        width = self.width_of(n)
        if cache.rows != self.rows or width is None or cache.model is not self.model:
            raise InputError(
                f"a captured prompt of {self.rows} rows and up to {max(self.widths, default=0)} tokens was given {n} "
                f"tokens for a cache of {cache.rows} rows{'' if cache.model is self.model else ' of another model'}: "
                "run a plain pass, model(ids, cache=cache)"
            )
        if ids is not None and (ids.device.type != "cpu" or not all_known(ids, self.model.vocab)):
            if ids.device.type == "cpu":
                self.model.check_ids(ids, counts)
            ids = ids.clamp(0, self.model.vocab - 1)  # padding may hold any
        variant = Variant(width, embeds is not None, states)
        self._select(variant)
        with current(self.device), cache.steady:
            real = open_captured(cache, self, n, n if counts is None else counts)
            try:
                self._serve(cache)
                self._place_all(cache, real, ids)
                if embeds is not None:
                    self._place_embeds(embeds)
                self.fit_room(max(cache.clock.high))
                self.capture(variant)
            except BaseException:
                cache._abort_open_pass()
                raise
            self.note_constants(cache)
            with device_commit(cache, real.low, real.high):
                self._replay(variant)
        return self.states[variant] if states else None

    def _place_all(self, cache: Cache, counts: Counts, ids: Tensor | None) -> None:
        """Copies in where the cache is stored, the counts and ids [rows, n]: at once, as far as the host knows them."""
        inputs, known = {"counts": counts.high}, ids is not None and ids.device.type == "cpu"
        if ids is not None and known:
            n = ids.shape[1]
            wide = ids if self.rows == 1 or n == self.T else functional.pad(ids, (0, self.T - n))
            inputs["ids"] = wide.flatten().tolist()
        self._copy_all(cache, **inputs)
        if not counts.exact:
            self.counts.copy_(counts.tensor)
        if ids is not None and not known:
            self.ids[:, : ids.shape[1]].copy_(ids)

    def _place_embeds(self, embeds: Tensor) -> None:
        own = self.embeds
        assert own is not None
        if embeds.shape[2] != own.shape[2]:
            raise InputError(
                f"embeddings are {embeds.shape[2]} wide, and the model's are {own.shape[2]} wide: compute them with "
                "model.embed(ids)"
            )
        own[:, : embeds.shape[1]].copy_(embeds)

    def prepare(self, cache: Cache, *, embedded: bool = False, states: bool = False) -> None:
        """Captures all widths now, so that no prompt waits for it. The cache is not changed.

        embedded, states   of prompts that are given as embeddings, and of texts that are scored: see `Variant`
        """
        variants = [Variant(width, embedded, states) for width in self.widths]
        with current(self.device), cache.steady:
            self._bind(cache)
            for one in reversed(variants):  # the largest first: the others fit its memory
                self.capture(one)
        self.uses.update(dict.fromkeys(variants, FIRST_USE))

    def commit(self, accepted: CountsLike | None = None) -> None:
        raise InputError("a captured prompt commits all its tokens itself")

    def abort(self) -> None:
        """Closes: nothing was fed."""

    def close(self) -> None:
        """Holds nothing of the pass."""

    def rotated(self, x: Tensor, rope: RopeTable) -> Tensor:
        return rotate(x, rope)

    # -- programs --------------------------------------------------------------------------------------------------

    def programs(self) -> Mapping[Variant, Program]:
        variants = [Variant(*one) for one in product(self.widths, (False, True), (False, True))]
        return {one: partial(self.program, one) for one in variants}

    @torch.no_grad()
    def program(self, variant: Variant) -> None:
        """The graph: from ids or embeddings to logits, and the device's part of commit. The lengths are written last,
        since all kernels read them."""
        from lamina.kernels.step_ends import commit_tokens, positions  # imports Triton

        self._select(variant)
        last = len(self.model.blocks)
        with kernels.in_workspace(self.workspace):
            positions(self.header, self.positions, self.model.max_positions)
            self.valid = torch.arange(self.T, device=self.device) < self.counts[:, None]
            ids, embeds = self.ids, None
            if self.embeds is not None:
                ids = torch.full_like(ids, -1)  # what the cache records where embeddings were fed
                embeds = self.embeds.masked_fill(~self.valid[..., None], 0)  # what an earlier prompt left
            logits = self.model.forward(
                ids if embeds is None else None, self, "last", embeds, (last,) if variant.states else ()
            )
            assert logits is not None
            for entry in self.entries:
                for one in entry.values():
                    one.commit()
            commit_tokens(logits, self.header, ids, self.counts, self.format.logs)
        if variant.states:
            self.states[variant] = self.hidden.pop(last)
        self._forget()

    def capture(self, *which: Hashable) -> None:
        super().capture(*which)
        if self.device.type != "cuda":  # what cannot run is found before a token is fed, as on a GPU
            counts = self.counts.clone()
            self.counts.zero_()
            for one in set(which) - self._ran:
                self._interpret(one)
            self.counts.copy_(counts)

    def _before_capture(self, programs: Sequence[Program]) -> None:
        wait_for_kernels(self.model, prompts=True)
        build_together(*programs)  # kernels are built many at a time; in the program they would be one by one

    def why_not_bound(self, cache: Cache) -> str | None:
        return why_not_prompted(cache)

    def _select(self, variant: Variant) -> None:
        """Makes `ids`, `positions` and `embeds` those of this variant, at the beginning of the memory of all."""
        self.T, self.constants = variant.width, self._constants.setdefault(variant, {})
        shape, size = (self.rows, self.T), self.rows * self.T
        self.ids, self.positions = (x[:size].view(shape) for x in (self._all_ids, self._all_positions))
        self.embeds = self._embedding_input()[:size].view(*shape, -1) if variant.embedded else None

    @torch.no_grad()
    def _embedding_input(self) -> Tensor:
        """[rows · T of the widest, width]: what embeddings are copied into, allocated when some are fed first."""
        if self._all_embeds is None:
            one = self.model.embed(self._all_ids.new_zeros(1, 1))
            self._all_embeds = one.new_zeros(len(self._all_ids), one.shape[-1])
        return self._all_embeds

    def _forget(self) -> None:
        """Drops the tensors of a pass: another graph uses their memory."""
        self.logits, self.valid = None, None
        for entry in self.entries:
            for one in entry.values():
                one.at_commit, one.new = None, None
