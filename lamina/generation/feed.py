"""Prompts, drafts and whole sequences into a cache: ragged rows, in pieces, by captured passes where there are some.

Every plain pass is opened and run by `lamina.runtime.feed`. Captured passes (`lamina.runtime.multi_token`) give the
same values up to rounding; they are used wherever they are possible and the tokens are few.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.cache.passes import OpenPass
from lamina.checkpoint.progress import Bar
from lamina.errors import CaptureError
from lamina.generation.prompt import Prompt, from_rows
from lamina.notices import notice
from lamina.runtime.eligibility import most_tokens, why_no_passes
from lamina.runtime.feed import feed, read
from lamina.runtime.multi_token import CapturedPass, width_for

if TYPE_CHECKING:
    from lamina.model import Logits, Model

FEW = 4  # captured passes that take less time than one plain pass, whose kernels the host launches one by one


def prefill(model: Model, prompt: Prompt, cache: Cache, chunk: int | None = None) -> Tensor:
    """Feeds the prompt, at most `chunk` tokens of a row at a time; -> each row's logits after it [B, V].

    A row may have no token, where the cache knows the logits after what it holds.
    """
    ids, embeds, counts = prompt.ids, prompt.embeds, prompt.counts
    longest = max(counts)
    size = chunk or max(longest, 1)
    with Bar("reading the prompt", sum(counts), "tokens", longest > size) as bar:
        for start in range(0, longest, size):
            some = [min(max(count - start, 0), size) for count in counts]
            ends = any(start < count <= start + size for count in counts)
            piece = slice(start, start + max(some))
            model(
                None if ids is None else ids[:, piece],
                embeds=None if embeds is None else embeds[:, piece],
                cache=cache,
                counts=None if len(set(some)) == 1 else some,
                logits="last" if ends else None,
            )
            bar.advance(sum(some))
    logits = cache.logits
    assert logits is not None
    return logits


def feed_rest(model: Model, rest: Sequence[Sequence[int]], cache: Cache, chunk: int | None = None) -> Tensor:
    """`prefill` of what is left of each row: by captured passes where that is little, if there are any."""
    reader, longest = Reader(model, cache), max(map(len, rest))
    most = reader.most
    if most is None or not 0 < longest <= FEW * most:
        return prefill(model, from_rows(rest, allow_empty=True), cache, chunk)
    for start in range(0, longest, most):
        piece = from_rows([row[start : start + most] for row in rest], allow_empty=True)
        assert piece.ids is not None
        reader.read_all(piece.ids.to(cache.device), range(cache.rows), piece.counts)
    logits = cache.logits
    assert logits is not None
    return logits


def feed_rows(model: Model, cache: Cache, tokens: Sequence[Sequence[int]]) -> Cache:
    """Feeds each row its tokens, all in one pass."""
    if any(tokens):
        ids, counts = padded(tokens, cache.device)
        feed(model, cache, ids, counts=counts)
    return cache


class Reader:
    """Reads tokens of some rows, and then commits as many of each row as it is told to.

    Captured passes are borrowed at the first read of their width, and given back when nobody has the reader any more.

    reason   why no pass of it is captured; None where passes of up to `most` tokens are
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
        """ids [R, T] -> the logits after each [R, T, V]"""
        return self._read(ids, rows, counts, "all")

    def read_all(self, ids: Tensor, rows: Sequence[int], counts: list[int] | None = None) -> Tensor:
        """Reads and commits every token: ids [R, T] -> the logits after each row's last [R, V]"""
        logits = self._read(ids, rows, counts, "last")
        self.commit(self.counts)
        return logits

    def read_rows(self, tokens: Sequence[Sequence[int]], rows: Sequence[int], most: int | None = None) -> Tensor:
        """The same for rows of any lengths, a list of ids each, in passes of up to `most` tokens (None: one pass)."""
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
        """Stores this many of each row's tokens."""
        assert self.open is not None
        self.open.commit(None if accepted == self.counts else accepted)

    def abort(self) -> None:
        """Drops a pass that is not committed yet."""
        if self.open is not None:
            self.open.abort()
            self.open = None

    def _read(self, ids: Tensor, rows: Sequence[int], counts: list[int] | None, wanted: Logits) -> Tensor:
        T = ids.shape[1]
        self.counts = [T] * len(rows) if counts is None else counts
        if self.most is not None and self.most >= T:
            try:
                return self._captured(ids, rows, counts, wanted)
            except CaptureError as problem:  # nothing was read
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
    """Ids [R, T], padded on the right, and how many of each row are real; None: all."""
    counts = [len(row) for row in rows]
    longest = max(counts)
    flat = [id for row in rows for id in (*row, *[0] * (longest - len(row)))]
    return on_device(flat, device).view(len(rows), longest), None if min(counts) == longest else counts
