"""Feeds tokens to a cache: `prefill` for prompts, in chunks; `Reader` for drafts and other short inputs.

`lamina.runtime.feed` opens and runs every plain pass. Captured ones compute the same values up to rounding: `Reader`
uses captured passes (`lamina.runtime.multi_token`) for few tokens, `prefill` captured prompts for up to 512 per row
(`prefill/prompt_reader.py`), if the model and the cache allow it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.attention.core import noted
from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.cache.passes import OpenPass
from lamina.cache.step import Step
from lamina.checkpoint.progress import Bar
from lamina.errors import CaptureError
from lamina.generation.prefill.chunks import chunk_for, out_of_memory, smaller
from lamina.generation.prefill.prompt_reader import PromptReader
from lamina.generation.prefill.watch import Watch
from lamina.generation.prompt import Prompt, from_rows
from lamina.notices import notice
from lamina.runtime.eligibility import most_tokens, why_no_passes
from lamina.runtime.feed import feed, read
from lamina.runtime.graphs import weights_stay
from lamina.runtime.multi_token import CapturedPass, width_for
from lamina.runtime.prompts.eligibility import MOST_IN_ALL

if TYPE_CHECKING:
    from lamina.model import Logits, Model

FEW = 4  # captured passes that are faster than one plain pass, whose kernels the host launches one by one


def prefill(model: Model, prompt: Prompt, cache: Cache, chunk: int | None = None, watch: Watch | None = None) -> Tensor:
    """Feeds the prompt in passes of up to `chunk` tokens per row (None: as large as fits into memory, usually all).
    -> logits after each row [B, V]

    The ids are in the vocabulary: callers check them before they change anything (`Model.check_ids`). A row may be
    empty if the cache knows the logits after its last token. An interrupt between two passes leaves the cache with the
    tokens of the passes so far. A pass that runs out of memory changes nothing; unless `chunk` is given, it is tried
    again with half the tokens. `watch` notes what was run.
    """
    watch = Watch() if watch is None else watch
    if prompt.ids is not None and prompt.ids.device.type != "cpu" and prompt.ids.numel() <= MOST_IN_ALL:
        prompt = replace(prompt, ids=prompt.ids.cpu())  # a captured prompt copies them in with the rest
    counts, start = prompt.counts, 0
    longest, total, scorer = max(counts), sum(counts), watch.scorer
    size = chunk or chunk_for(model, cache, counts) or max(longest, 1)
    if scorer is not None:
        scorer.begin(cache)
    with (
        Bar("reading the prompt", total, "tokens", longest > size) as bar,
        weights_stay(),
        PromptReader(model, cache) as reader,
        noted(watch.ways),
    ):
        while start < longest:
            some = [min(max(count - start, 0), size) for count in counts]
            if reader.feed(prompt, start, some, scorer):
                watch.captured += 1
            else:
                ends = any(start < count <= start + size for count in counts)
                less = smaller(size, len(counts)) if chunk is None else None
                hidden = () if scorer is None else (scorer.layer,)
                step = _read_piece(model, prompt, cache, start, some, "last" if ends else None, hidden, less)
                if step is None:  # out of memory
                    assert less is not None
                    size = less
                    continue
                step.commit()
                if scorer is not None:
                    scorer.add(step.hidden.pop(scorer.layer), some)
                watch.packed += step.is_packed
                watch.reason = reader.reason
            watch.passes, watch.chunk = watch.passes + 1, max(watch.chunk, max(some))
            start += size
            bar.advance(sum(some))
            watch.between(sum(min(count, start) for count in counts), total)
    logits = cache.logits
    assert logits is not None
    return logits


def _read_piece(
    model: Model, prompt: Prompt, cache: Cache, start: int, counts: list[int], logits: Logits, hidden: tuple[int, ...],
    less: int | None,
) -> Step | None:  # fmt: skip
    """Reads counts[row] tokens of each row from `start` on. -> the open pass; None if it ran out of memory, which is an
    error unless it may be tried again with `less` tokens a row"""
    piece, ids, embeds = slice(start, start + max(counts)), prompt.ids, prompt.embeds
    ids = None if ids is None else ids[:, piece].to(model.device)
    embeds = None if embeds is None else embeds[:, piece].to(model.device, model.dtype)
    real = None if len(set(counts)) == 1 else counts
    try:
        return read(model, cache, ids, counts=real, logits=logits, embeds=embeds, hidden=hidden, whole=True)[1]
    except RuntimeError as error:
        if less is None or not out_of_memory(error):
            raise
    notice(
        f"a prompt pass of {max(counts):,} tokens a row did not fit into memory: going on with {less:,}; "
        "prefill_chunk sets it",
        unexpected=True,
    )
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def feed_rest(
    model: Model, rest: Sequence[Sequence[int]], cache: Cache, chunk: int | None = None, watch: Watch | None = None
) -> Tensor:
    """`prefill` of the ids that are left of each row: by captured passes if there are few ids."""
    watch = Watch() if watch is None else watch
    reader, longest = Reader(model, cache), max(map(len, rest))
    most, whole = reader.most, from_rows(rest, allow_empty=True)
    if most is None or not 0 < longest <= FEW * most or watch.scorer is not None:
        return prefill(model, whole, cache, chunk, watch)
    with PromptReader(model, cache) as prompts:
        if longest > most and prompts.feed(whole, 0, whole.counts):
            watch.captured, watch.passes = watch.captured + 1, watch.passes + 1
            watch.chunk = max(watch.chunk, longest)
        else:
            for start in range(0, longest, most):
                piece = from_rows([row[start : start + most] for row in rest], allow_empty=True)
                assert piece.ids is not None
                reader.read_all(piece.ids.to(cache.device), range(cache.rows), piece.counts)
                watch.captured, watch.passes = watch.captured + 1, watch.passes + 1
                watch.chunk = max(watch.chunk, max(piece.counts))
    logits = cache.logits
    assert logits is not None
    return logits


def feed_rows(model: Model, cache: Cache, tokens: Sequence[Sequence[int]]) -> Cache:
    """Feeds each row its list of ids, all rows in one pass."""
    if any(tokens):
        ids, counts = padded(tokens, cache.device)
        feed(model, cache, ids, counts=counts)
    return cache


class Reader:
    """Runs passes over some rows of a cache; the caller then commits a number of tokens per row.

    A captured pass is borrowed at the first read of its width, and released when the reader is garbage collected.

    most     captured passes have up to this many tokens per row; None if all passes are plain
    reason   why all passes are plain; None if captured ones are used
    """

    def __init__(self, model: Model, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.reason = why_no_passes(model, cache)
        self.most = None if self.reason else most_tokens(cache.rows)
        self.open: OpenPass | None = None
        self.counts: list[int] = []
        self.passes: dict[int, CapturedPass] = {}
        weakref.finalize(self, _give_back, self.passes)

    def read(self, ids: Tensor, rows: Sequence[int], counts: list[int] | None = None) -> Tensor:
        """Opens a pass: ids [R, T] -> the logits after every token [R, T, V]. `commit` or `abort` ends the pass."""
        return self._read(ids, rows, counts, "all")

    def read_all(self, ids: Tensor, rows: Sequence[int], counts: list[int] | None = None) -> Tensor:
        """Reads and commits every token: ids [R, T] -> the logits after each row's last token [R, V]"""
        logits = self._read(ids, rows, counts, "last")
        self.commit(self.counts)
        return logits

    def read_rows(self, tokens: Sequence[Sequence[int]], rows: Sequence[int], most: int | None = None) -> Tensor:
        """`read_all` for lists of ids of different lengths, in passes of up to `most` tokens (None: one pass)."""
        unread = [list(one) for one in tokens]
        piece = most or max(map(len, unread))
        while long := [i for i, one in enumerate(unread) if len(one) > piece]:
            ids, _ = padded([unread[i][:piece] for i in long], self.cache.device)
            self.read_all(ids, [rows[i] for i in long])
            for i in long:
                del unread[i][:piece]
        ids, counts = padded(unread, self.cache.device)
        return self.read_all(ids, rows, counts)

    def commit(self, accepted: list[int]) -> None:
        """Commits the first accepted[row] tokens of each row of the open pass."""
        assert self.open is not None
        self.open.commit(None if accepted == self.counts else accepted)

    def abort(self) -> None:
        """Drops the open pass, if there is one."""
        if self.open is not None:
            self.open.abort()
            self.open = None

    def _read(self, ids: Tensor, rows: Sequence[int], counts: list[int] | None, wanted: Logits) -> Tensor:
        T = ids.shape[1]
        self.counts = [T] * len(rows) if counts is None else counts
        if self.most is not None and self.most >= T:
            try:
                return self._captured(ids, rows, counts, wanted)
            except CaptureError as problem:  # raised before any token is fed
                self.reason, self.most = str(problem), None
                notice(f"reading by plain passes, since {self.reason}", unexpected=True)
        logits, self.open = read(self.model, self.cache, ids, counts=counts, rows=rows, logits=wanted)
        assert logits is not None
        return logits

    def _captured(self, ids: Tensor, rows: Sequence[int], counts: list[int] | None, wanted: Logits) -> Tensor:
        cache, width = self.cache, width_for(self.cache.rows, ids.shape[1])
        if width not in self.passes:
            self.passes[width] = self.model.graphs.pass_of(cache.rows, width, cache)
        self.open = one = self.passes[width]
        logits = one.read(cache, ids, counts, None if len(rows) == cache.rows else rows)
        if wanted == "last":
            last = on_device([max(count - 1, 0) for count in self.counts], ids.device)
            every = torch.arange(len(rows), device=ids.device)
            logits = logits[every, last] if ids.shape[1] > 1 else logits[:, 0]
        return logits


def _give_back(passes: dict[int, CapturedPass]) -> None:
    for one in passes.values():
        one.release()


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, list[int] | None]:
    """Ids [R, T], padded on the right, and the number of real ids per row; None if no row is padded."""
    counts = [len(row) for row in rows]
    longest = max(counts)
    flat = [id for row in rows for id in (*row, *[0] * (longest - len(row)))]
    return on_device(flat, device).view(len(rows), longest), None if min(counts) == longest else counts
