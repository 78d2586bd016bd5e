"""Initial weights, before a checkpoint is loaded."""

from __future__ import annotations

import torch
from torch import nn


def random_weight(*shape: int) -> nn.Parameter:
    """A normal distribution with a standard deviation of 1/√inputs. On the meta device nothing is drawn: PyTorch would
    load its compiler for that, which takes seconds."""
    weight = torch.empty(shape)
    return nn.Parameter(weight if weight.is_meta else weight.normal_(std=shape[-1] ** -0.5))
