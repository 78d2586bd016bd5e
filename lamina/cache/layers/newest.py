"""The tokens of a pass that commit writes to a ring: the newest accepted ones, at most as many as it has slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.codec.formats import Fields

if TYPE_CHECKING:
    from lamina.cache.packed_rows import PackedRows


class Newest(dict[str, Tensor]):
    """Fields of those tokens alone, in the order of `newest_tokens`."""


class NewestRun(dict[str, Tensor]):
    """Fields of the newest tokens of rows of one length, in the order of positions, the first of them `first`."""

    def __init__(self, fields: Fields, first: int) -> None:
        super().__init__(fields)
        self.first = first


def last_run(new: Fields, start: int, most: int) -> NewestRun:
    """The newest tokens, at most `most`, of a pass over rows of `start` tokens each without padding: a copy, unless it
    is all of them."""
    tokens = next(iter(new.values())).shape[-2]
    if most >= tokens:
        return NewestRun(new, start)
    return NewestRun({name: x[..., tokens - most :, :].clone() for name, x in new.items()}, start + tokens - most)


def newest_tokens(accepted: Tensor, most: int) -> Tensor:
    """[R, most] indices in the pass of each row's newest accepted tokens, the last first; where there are fewer, the
    last again, and -1 in a row that accepts none. So no slot gets two different tokens.

    >>> newest_tokens(torch.tensor([5, 1, 0]), most=2).tolist()
    [[4, 3], [0, 0], [-1, -1]]
    """
    last = accepted[:, None] - 1
    newest = last - torch.arange(most, device=last.device)
    return torch.where(newest >= 0, newest, last)


def only_newest(new: Fields, accepted: Tensor, most: int) -> Newest:
    """A copy of what commit will write, so that the rest of the pass can be freed before."""
    chosen = newest_tokens(accepted, most).clamp(min=0)
    return Newest({name: gather_tokens(x, chosen) for name, x in new.items()})


def newest_of_packed(new: Fields, rows: PackedRows, ring: int) -> Newest:
    """The same of rows side by side on one token axis, new [1, *lead, N, D] -> [R, *lead, min(ring, longest), D]."""
    chosen = newest_tokens(rows.counts, min(ring, rows.longest)).clamp(min=0) + rows.starts[:, None]
    chosen = chosen.clamp(max=max(rows.tokens - 1, 0))  # of an empty row nothing is written
    return Newest({name: x[0].movedim(-2, 0)[chosen].movedim(1, -2) for name, x in new.items()})


def by_token(x: Tensor) -> Tensor:
    """[1, *lead, N, D] -> [N, *lead, 1, D]: each token of the axis as a row of its own"""
    return x[0].movedim(-2, 0).unsqueeze(-2)


def gather_tokens(new: Tensor, index: Tensor) -> Tensor:
    """Gathers tokens by their index in the pass. new [R, *lead, T, D], index [R, N] -> [R, *lead, N, D]"""
    shape = (index.shape[0], *(1,) * (new.dim() - 3), index.shape[1], 1)
    return new.gather(-2, index.reshape(shape).expand(*new.shape[:-2], -1, new.shape[-1]))
