"""Classifier-free guidance: scores moved away from those of a negative prompt.

The loop feeds the negative prompt, and then each chosen token, to a cache of its own; this is the arithmetic on the two
rows of scores. It comes before every processor.
"""

from __future__ import annotations

from torch import Tensor


def guided(scores: Tensor, negative: Tensor, scale: float) -> Tensor:
    """negative + scale · (scores - negative), both as log-probabilities: 1 gives the scores, more goes further. [B, V]

    >>> import torch
    >>> guided(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]]), 2.0).diff()  # 2 apart became 4
    tensor([[-4.]])
    """
    scores, negative = scores.log_softmax(dim=-1), negative.log_softmax(dim=-1)
    return negative + scale * (scores - negative)
