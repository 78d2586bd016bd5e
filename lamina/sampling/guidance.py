"""Classifier-free guidance: moves scores away from those of a negative prompt.

The guide (`generation/strategies/guide.py`) feeds the negative prompt and then each chosen token to a cache of its own.
This file is the arithmetic on both scores. It runs before every processor.
"""

from __future__ import annotations

from torch import Tensor

from lamina.sampling.kinds import LARGE, Custom, Number
from lamina.sampling.setting import Need, Setting


def guide_scores(scores: Tensor, negative: Tensor, scale: float) -> Tensor:
    """negative + scale · (scores - negative), both as log-probabilities: a scale of 1 changes nothing. [B, V]

    >>> import torch
    >>> guide_scores(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]]), 2.0).diff()  # a difference of 2 becomes 4
    tensor([[-4.]])
    """
    scores, negative = scores.log_softmax(dim=-1), negative.log_softmax(dim=-1)
    return negative + scale * (scores - negative)


GUIDANCE = Need(
    "guidance",
    met=lambda values: values["guidance_scale"] not in (None, 1.0),
    advice="add guidance_scale=1.5 or another number but 1",
)
SETTINGS = (
    Setting(
        "guidance_scale", Number(-LARGE), default=None,
        meaning="Classifier-free guidance: above 1 moves away from the negative prompt; 1 changes nothing.",
    ),
    Setting(
        "negative_prompt", Custom(), default=None, needs=GUIDANCE,
        meaning="What guidance moves away from, in any form of prompt; None: the last token of the prompt.",
    ),
)  # fmt: skip
