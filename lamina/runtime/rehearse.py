"""Kernels of a decode step, built before they are needed: in threads, while weights are on their way.

The program of a captured step is run once over a model without numbers (on the meta device). Every launch in it then
asks for its kernel to be built and does nothing else. Building a kernel is mostly waiting for a compiler, so many are
built at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import torch
from torch import nn

from lamina import kernels
from lamina.checkpoint.loader import finish_buffers, own_dtype, owner, tensors_of
from lamina.config import Config
from lamina.model import Model


class Rehearsal:
    """The kernels of one-row decoding being built in the background; `wait` until they are there."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.failed: BaseException | None = None
        self.thread = Thread(target=self._build, args=(model, device), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        self.thread.join()

    def _build(self, model: Model, device: torch.device) -> None:
        try:
            with torch.cuda.device(device), torch.no_grad():
                build_kernels(model)
        except Exception as problem:  # whoever launches the kernel meets it again, with a better trace
            self.failed = problem


def build_kernels(model: Model, rows: int = 1) -> None:
    """Builds the kernels of a decode step of a model on the meta device."""
    from triton import AsyncCompileMode

    from lamina.kernels.launch import rehearsing
    from lamina.runtime.capture import CapturedStep

    step = CapturedStep(model, rows)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, AsyncCompileMode(pool), rehearsing():
        step.rehearse()


def without_numbers(config: Mapping[str, Any], dtype: torch.dtype) -> Model:
    """The model of a configuration on the meta device, each parameter in the dtype that it will be loaded in."""
    from lamina.models import family

    with torch.device("meta"):
        model = family(config["model_type"]).build(Config(config))
    for paths, like in tensors_of(model):
        if isinstance(like, nn.Parameter):
            values = torch.empty(like.shape, dtype=own_dtype(model, paths, like, dtype), device="meta")
            parameter = nn.Parameter(values, requires_grad=False)
            for path in paths:
                module, name = owner(model, path)
                setattr(module, name, parameter)
    finish_buffers(model, torch.device("meta"))
    return model.eval()


def begin(config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Rehearsal | None:
    """Starts building the kernels for a model that is about to be loaded; None where it would use none."""
    if device.type != "cuda" or kernels.why_not(torch.empty(0, device=device, dtype=dtype)) is not None:
        return None
    return Rehearsal(without_numbers(config, dtype), device)
