"""How likely counts are under given probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def chance(counts: Tensor, probabilities: Tensor | None = None) -> float:
    """The chance that draws from `probabilities` (all equal when None) lie further from them than these counts do:
    the upper tail of chi-square. Kinds expected fewer than five times are put together."""
    counts = counts.double()
    p = torch.ones_like(counts) if probabilities is None else probabilities.double()
    expected = counts.sum() * p / p.sum()
    rare = expected < 5
    if bool(rare.any()):
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
        counts, expected = (x[expected > 0] for x in (counts, expected))
    distance = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), distance / 2))
