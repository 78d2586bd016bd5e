"""`Scorer`: log-probabilities of tokens as they are fed, without the logits of all tokens ever being in memory.

A pass keeps the hidden states after its last block. The head (`model.unembed`, with its norm, scale and softcap) is
applied to blocks of them. Of a block's logits, in float32, only the log-probability of each next token and the `top`
highest ones are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache

if TYPE_CHECKING:
    from lamina.model import Model

BLOCK_BYTES = 1 << 27  # of float32 logits in memory at once


class Scorer:
    """Log-probabilities of the tokens of ragged rows, each given the tokens before it.

    rows     the ids that will be fed to each row of the cache
    top      how many of the most likely tokens to keep for each token
    first    the first token of each row that is scored; earlier ones are fed only
    """

    def __init__(self, model: Model, rows: Sequence[Sequence[int]], top: int = 0, first: Sequence[int] = ()) -> None:
        self.model, self.top = model, min(top, model.vocab)
        self.counts = [len(row) for row in rows]
        self.first = list(first) or [0] * len(rows)
        self.fed = [0] * len(rows)
        widest, device = max(self.counts), model.device
        self.ids = torch.zeros(len(rows), widest, dtype=torch.int64)
        for r, row in enumerate(rows):
            self.ids[r, : len(row)] = torch.tensor(row, dtype=torch.int64)
        self.own = torch.full((len(rows), widest), float("nan"), device=device)  # NaN: not scored
        self.best = torch.zeros(len(rows), widest, self.top, device=device)
        self.best_ids = torch.zeros(len(rows), widest, self.top, dtype=torch.int64, device=device)

    @property
    def layer(self) -> int:
        """The hidden states that `add` needs, as `Model.forward` numbers them."""
        return len(self.model.blocks)

    def begin(self, cache: Cache) -> None:
        """Scores each row's first token, if the cache knows the logits after the token before it."""
        logits = cache.logits
        if logits is None:
            return
        known = (~logits[:, 0].isnan()).tolist()
        rows = [r for r, n in enumerate(self.counts) if n and known[r] and not self.first[r]]
        if rows:
            self._keep(logits[rows].float(), torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64))

    def add(self, states: Tensor, counts: Sequence[int]) -> None:
        """Scores the tokens that follow those of a pass: hidden states [R, T, width], of which row r has counts[r]"""
        T = states.shape[1]
        start, all_counts, first = (torch.tensor(x)[:, None] for x in (self.fed, self.counts, self.first))
        time = torch.arange(T)
        scored = start + 1 + time  # [R, T] the token that each hidden state predicts
        wanted = (time < torch.tensor(counts)[:, None]) & (scored < all_counts) & (scored >= first)
        row, at = wanted.nonzero(as_tuple=True)
        flat, index, size = states.flatten(0, 1), (row * T + at).to(states.device), block_size(self.model.vocab)
        for begin in range(0, len(row), size):
            some = slice(begin, begin + size)
            logits = self.model.unembed(flat[index[some]])
            self._keep(logits.float(), row[some], scored[row[some], at[some]])
        self.fed = [done + count for done, count in zip(self.fed, counts, strict=True)]

    def _keep(self, logits: Tensor, row: Tensor, token: Tensor) -> None:
        """Stores log-probabilities from logits [N, V], where logits[i] are those of token[i] of row[i]."""
        device = logits.device
        total = logits.logsumexp(dim=-1)
        at = row.to(device), token.to(device)
        ids = self.ids[row, token].to(device)
        self.own[at] = logits.gather(1, ids[:, None])[:, 0] - total
        if self.top:
            best = logits.topk(self.top, dim=-1)
            self.best[at], self.best_ids[at] = best.values - total[:, None], best.indices

    def tops(self, row: int) -> list[tuple[tuple[int, float], ...]]:
        """For each token of a row, the most likely tokens with their log-probabilities."""
        both = zip(self.best_ids[row].tolist(), self.best[row].tolist(), strict=True)
        return [tuple(zip(*one, strict=True)) for one in both][: self.counts[row]]


def block_size(vocab: int) -> int:
    """Tokens whose logits are computed at once.

    >>> block_size(128_256)
    261
    """
    return max(1, BLOCK_BYTES // (4 * vocab))
