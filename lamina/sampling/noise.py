"""Noise without state: the number for (seed, row, position, stream, id) is a hash of these five, nothing else.

So a row draws the same tokens alone and in any batch, continued and from scratch, on any device, and inside a captured
step (`kernels/noise.py` is the same hash). It is 32-bit arithmetic that wraps around, which every device does alike.
Seed, row, position and stream are folded into two words, and an id is mixed with one and then the other: with a single
word some 65 thousand positions would be enough for two of them to share all their noise.

A token is drawn by the Gumbel maximum: argmax(scores + gumbel(noise)) picks an id with its softmax probability. The
largest of that sum are a draw without replacement, which is what beam sampling takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, SECOND = 0x21F0AAAD, 0xD35A2D97  # multipliers of `_mix`
LEFT, RIGHT = 0x243F6A88, 0x85A308D3  # where the two words begin
STEP = 2.0**-32  # between two numbers
BELOW_ONE = 1 - 2.0**-24  # the largest float32 under 1


def noise(seed: int | Tensor, rows: Tensor, positions: Tensor, vocab: int, stream: int = 0) -> Tensor:
    """Uniform numbers in (0, 1), float32. [B, V]

    seed       one for all rows, or [B]; 64 bits count
    rows       [B] each row's own number, whatever batch it is in
    positions  [B] of the token to be drawn
    stream     tells apart several draws at one position

    >>> rows, positions = torch.tensor([0, 7]), torch.tensor([3, 3])
    >>> both = noise(1, rows, positions, 5)
    >>> torch.equal(both[1:], noise(1, rows[1:], positions[1:], 5))
    True
    """
    left, right = _words(seed, rows, positions, stream)
    ids = torch.arange(vocab, dtype=torch.int32, device=left.device)
    mixed = _mix(_mix(ids + left[:, None]) + right[:, None])
    # From 32 bits to float32 without ever reaching 0 or 1; small numbers keep all their bits.
    return ((mixed.to(torch.int64) & 0xFFFFFFFF).to(torch.float32) * STEP + STEP / 2).clamp(max=BELOW_ONE)


def gumbel(uniform: Tensor) -> Tensor:
    """Uniform numbers as Gumbel noise, between about -2.8 and 22.9. Written so that the finest uniform numbers, those
    near 0, become its large ones: they decide."""
    return -(-torch.log1p(-uniform)).log()


def draw(scores: Tensor, seed: int | Tensor, rows: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """One id for each row of scores [B, V], with its softmax probability. -> [B]

    >>> scores, rows = torch.tensor([[0.0, 1.0, -torch.inf]]), torch.arange(2000)  # probabilities 0.27, 0.73 and 0
    >>> draw(scores.expand(2000, 3), 5, rows, torch.zeros_like(rows)).bincount()
    tensor([ 518, 1482])
    """
    return (scores + gumbel(noise(seed, rows, positions, scores.shape[-1], stream))).argmax(dim=-1)


def _words(seed: int | Tensor, rows: Tensor, positions: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """All but the id, in two words. [B] int32"""
    if isinstance(seed, int):
        seed = torch.full_like(rows, _signed(seed, 64), dtype=torch.int64)
    left, right = (torch.full_like(rows, _signed(start, 32), dtype=torch.int32) for start in (LEFT, RIGHT))
    for word in (seed, seed >> 32, rows, positions):
        low = word.to(torch.int64).to(torch.int32)
        left, right = _mix(left + low), _mix(right + low)
    return _mix(left + _signed(stream, 32)), _mix(right + _signed(stream, 32))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of x reaches every bit of the result; x int32."""
    x = x ^ (x >> 16 & 0xFFFF)  # the masks make arithmetic shifts logical
    x = x * FIRST
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * _signed(SECOND, 32)
    return x ^ (x >> 15 & 0x1FFFF)


def _signed(value: int, bits: int) -> int:
    """The low bits of an integer, read as two's complement."""
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
