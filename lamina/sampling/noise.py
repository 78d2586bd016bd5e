"""Stateless sampling noise: the value for (seed, row, position, stream, id) is a hash of these five and nothing else.

So a row draws the same tokens alone and in any batch, continued or from scratch, on any device, and inside a captured
step (`kernels/noise.py` computes the same hash). The hash is 32-bit integer arithmetic with wrap-around, which is exact
on every device. Seed, row, position and stream are folded into two 32-bit words, and an id is mixed with one and then
the other. A single word would not do: among some 65 thousand positions two would share a word (the birthday bound), and
with it all their noise.

Tokens are drawn with the Gumbel-max trick: argmax(scores + gumbel(noise)) is an id drawn with its softmax probability.
The n largest sums are n draws without replacement, which beam sampling uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, SECOND = 0x21F0AAAD, 0xD35A2D97  # multipliers of `_mix`
LEFT, RIGHT = 0x243F6A88, 0x85A308D3  # initial values of the two words
STEP = 2.0**-32  # between two adjacent uniform values
BELOW_ONE = 1 - 2.0**-24  # the largest float32 under 1


def noise(seed: int | Tensor, rows: Tensor, positions: Tensor, vocab: int, stream: int = 0) -> Tensor:
    """Uniform values in (0, 1), float32. [B, V]

    seed       one for all rows, or [B]; 64 bits
    rows       [B] number of each row, independent of its batch
    positions  [B] of the token to be drawn
    stream     distinguishes several draws at one position

    >>> rows, positions = torch.tensor([0, 7]), torch.tensor([3, 3])
    >>> both = noise(1, rows, positions, 5)
    >>> torch.equal(both[1:], noise(1, rows[1:], positions[1:], 5))
    True
    """
    left, right = _words(seed, rows, positions, stream)
    ids = torch.arange(vocab, dtype=torch.int32, device=left.device)
    mixed = _mix(_mix(ids + left[:, None]) + right[:, None])
    # 32 bits to float32 in the open interval (0, 1); small values keep all their bits
    return ((mixed.to(torch.int64) & 0xFFFFFFFF).to(torch.float32) * STEP + STEP / 2).clamp(max=BELOW_ONE)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise from uniform values: about -2.8 to 22.9. Uniform values near 0, where float32 is finest, become the
    large noise, which decides the maximum."""
    return -(-torch.log1p(-uniform)).log()


def draw(scores: Tensor, seed: int | Tensor, rows: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Draws one id per row of scores [B, V] with its softmax probability. -> [B]

    >>> scores, rows = torch.tensor([[0.0, 1.0, -torch.inf]]), torch.arange(2000)  # probabilities 0.27, 0.73 and 0
    >>> draw(scores.expand(2000, 3), 5, rows, torch.zeros_like(rows)).bincount()
    tensor([ 518, 1482])
    """
    return (scores + gumbel(noise(seed, rows, positions, scores.shape[-1], stream))).argmax(dim=-1)


def _words(seed: int | Tensor, rows: Tensor, positions: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Seed, row, position and stream, hashed into two words. [B] int32 each"""
    if isinstance(seed, int):
        seed = torch.full_like(rows, _signed(seed, 64), dtype=torch.int64)
    left, right = (torch.full_like(rows, _signed(start, 32), dtype=torch.int32) for start in (LEFT, RIGHT))
    for word in (seed, seed >> 32, rows, positions):
        low = word.to(torch.int64).to(torch.int32)
        left, right = _mix(left + low), _mix(right + low)
    return _mix(left + _signed(stream, 32)), _mix(right + _signed(stream, 32))


def _mix(x: Tensor) -> Tensor:
    """A bijective hash of int32 words: every bit of x affects every bit of the result."""
    x = x ^ (x >> 16 & 0xFFFF)  # the masks turn arithmetic shifts into logical ones
    x = x * FIRST
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * _signed(SECOND, 32)
    return x ^ (x >> 15 & 0x1FFFF)


def _signed(value: int, bits: int) -> int:
    """The lowest `bits` bits of an integer as a two's complement value."""
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
