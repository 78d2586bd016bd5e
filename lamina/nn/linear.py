"""`Linear`: a matrix product that stays near the memory limit when there are few tokens.

A product with few rows costs what reading the weight costs, if the kernel lets every core read. On a CPU the library's
x Wᵀ often does not: it runs on one core, or packs the weight first. The same numbers asked for the other way round, W xᵀ
with at least two columns, can be three times as fast. Which way is faster is a fact of the machine, so it is measured:
once a shape, for a few milliseconds, the first time it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_ROWS = 64  # with more, the product is bound by arithmetic, and F.linear is good at that
SAMPLE = 64 << 20  # bytes of a weight that are enough to measure with
ROUNDS, ENOUGH = 3, 0.02  # measured at least so often, and on for so many seconds

Way = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(nn.Linear):
    """y = x Wᵀ + b for x [..., in] and W [out, in]."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if not 0 < rows <= MOST_ROWS or x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        return fastest(x, self.weight, rows)(x, self.weight, self.bias)


def straight(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]"""
    return F.linear(x, weight, bias)


def flipped(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same as W xᵀ. A single row is taken twice: matrix times vector is the slow case."""
    rows = x.reshape(-1, x.shape[-1])
    one = rows.shape[0] == 1
    y = torch.mm(weight, (rows.repeat(2, 1) if one else rows).t())  # [out, rows]
    y = (y[:, 0] if one else y.t()).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


WAYS: tuple[Way, ...] = (straight, flipped)
_fastest: dict[tuple[object, ...], Way] = {}


def fastest(x: Tensor, weight: Tensor, rows: int) -> Way:
    """The way that was fastest for this shape, up to the next power of two of rows."""
    key = (weight.shape, weight.dtype, (rows - 1).bit_length(), torch.get_num_threads())
    way = _fastest.get(key)
    if way is None:
        way = _fastest[key] = measured(x.detach(), weight.detach())
    return way


@torch.no_grad()
def measured(x: Tensor, weight: Tensor) -> Way:
    """Tries the ways in turn. The best time of each counts: what else the machine does can only add to it."""
    weight = weight[: max(1, SAMPLE // (weight.shape[1] * weight.element_size()))]
    best = dict.fromkeys(WAYS, float("inf"))
    start, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - start < ENOUGH:
        for way in WAYS:
            began = time.perf_counter()
            way(x, weight, None)
            best[way] = min(best[way], time.perf_counter() - began)
        rounds += 1
    return min(WAYS, key=best.__getitem__)
