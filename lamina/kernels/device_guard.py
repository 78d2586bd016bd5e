"""Makes the device of tensors the current one: Triton launches and some CUDA queries use the current device only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is the current CUDA device; nothing happens for other kinds of devices."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream of this device."""
    if device.type != "cuda":
        return False
    with current(device):
        return torch.cuda.is_current_stream_capturing()
