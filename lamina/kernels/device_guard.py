"""The device of tensors as the current one: Triton, and some questions to CUDA, know no other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one inside, where it is not."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of this device is being captured in a graph."""
    if device.type != "cuda":
        return False
    with current(device):
        return torch.cuda.is_current_stream_capturing()
