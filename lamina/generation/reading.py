"""Passes of several tokens over a cache whose reader decides afterwards how many are taken in: captured, or plain.

Both give the same numbers to rounding. Captured ones (`lamina.runtime.multi_token`) are used wherever they are
possible and the tokens are few; a prompt, say, is read by a plain pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import on_device
from lamina.cache.step import Step
from lamina.errors import CaptureError
from lamina.notices import notice
from lamina.runtime.eligibility import most_tokens, why_no_passes
from lamina.runtime.multi_token import CapturedPass, width_for

if TYPE_CHECKING:
    from lamina.model import Logits, Model


class Reader:
    """Reads tokens of some rows, and then takes in as many of each as it is told to.

    Captured passes are borrowed at the first read of their width, and given back when nobody has the reader any more.

    reason   why no pass of it is captured; None where passes of up to `most` tokens are
    """

    def __init__(self, model: Model, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.reason = why_no_passes(model, cache)
        self.most = None if self.reason else most_tokens(cache.rows)
        self.open: Step | CapturedPass | None = None
        self.counts: list[int] = []
        self.passes: dict[int, CapturedPass] = {}
        weakref.finalize(self, _give_back, self.passes)

    def read(self, ids: Tensor, rows: Sequence[int], counts: list[int] | None = None) -> Tensor:
        """ids [R, T] -> the logits after each [R, T, V]"""
        return self._read(ids, rows, counts, "all")

    def read_all(self, ids: Tensor, rows: Sequence[int], counts: list[int] | None = None) -> Tensor:
        """Reads and takes in every token: ids [R, T] -> the logits after each row's last [R, V]"""
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
        """Takes in so many of each row's tokens."""
        assert self.open is not None
        self.open.commit(None if accepted == self.counts else accepted)

    def abort(self) -> None:
        """Drops a pass that is not committed yet."""
        if self.open is not None:
            self.open.abort()
            self.open = None

    def _read(self, ids: Tensor, rows: Sequence[int], counts: list[int] | None, wanted: Logits) -> Tensor:
        cache, T = self.cache, ids.shape[1]
        self.counts = [T] * len(rows) if counts is None else counts
        some = None if len(rows) == cache.rows else rows
        if self.most is not None and self.most >= T:
            try:
                logits = self._pass_of(T).read(cache, ids, counts, some)
            except CaptureError as problem:  # nothing was read
                self.reason, self.most = str(problem), None
                notice(f"reading by plain passes, since {self.reason}", unexpected=True)
            else:
                if wanted == "last":
                    last = on_device([max(count - 1, 0) for count in self.counts], ids.device)
                    logits = logits[torch.arange(len(rows), device=ids.device), last] if T > 1 else logits[:, 0]
                return logits
        step = self.open = cache.step(T, counts, rows=some)
        try:
            found = self.model.forward(ids, step, logits=wanted)
        except BaseException:
            step.abort()
            raise
        assert found is not None
        return found

    def _pass_of(self, tokens: int) -> CapturedPass:
        """A captured pass that reads this many tokens a row: the next one to be committed."""
        width = width_for(self.cache.rows, tokens)
        if width not in self.passes:
            self.passes[width] = self.model.graphs.pass_of(self.cache.rows, width, self.cache)
        self.open = self.passes[width]
        return self.passes[width]


def _give_back(passes: dict[int, CapturedPass]) -> None:
    for one in passes.values():
        one.release()


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, list[int] | None]:
    """Ids [R, T], padded on the right, and how many of each row are real; None: all."""
    counts = [len(row) for row in rows]
    longest = max(counts)
    flat = [id for row in rows for id in (*row, *[0] * (longest - len(row)))]
    return on_device(flat, device).view(len(rows), longest), None if min(counts) == longest else counts
