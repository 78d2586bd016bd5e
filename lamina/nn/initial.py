"""What weights are before a checkpoint fills them."""

from __future__ import annotations

import torch
from torch import nn


def random_weight(*shape: int) -> nn.Parameter:
    """Matrices that training could start from, scaled by their inputs; on the meta device, where PyTorch would load its
    compiler to draw no numbers, as they come."""
    weight = torch.empty(shape)
    return nn.Parameter(weight if weight.is_meta else weight.normal_(std=shape[-1] ** -0.5))
