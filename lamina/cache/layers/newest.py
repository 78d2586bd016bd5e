"""The tokens of a pass that commit writes to a ring: the newest accepted ones, at most as many as it has slots."""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.cache.codec.formats import Fields


class Newest(dict[str, Tensor]):
    """Fields of those tokens alone, in the order of `newest_tokens`."""


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


def gather_tokens(new: Tensor, index: Tensor) -> Tensor:
    """Gathers tokens by their index in the pass. new [R, *lead, T, D], index [R, N] -> [R, *lead, N, D]"""
    shape = (index.shape[0], *(1,) * (new.dim() - 3), index.shape[1], 1)
    return new.gather(-2, index.reshape(shape).expand(*new.shape[:-2], -1, new.shape[-1]))
