"""Threads that build kernels, many at a time: building one is mostly waiting for a compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from lamina.model import Model

builds: WeakKeyDictionary[Model, Thread] = WeakKeyDictionary()
"""Models whose kernels are being built, and the thread that does it (prebuild.py)."""


def wait_for_kernels(model: Model) -> None:
    """Waits until the kernels that are being built for this model are there, if any are."""
    if (thread := builds.get(model)) is not None:
        thread.join()
        builds.pop(model, None)


def build_together(*programs: Callable[[], object]) -> None:
    """Builds every kernel that these programs launch, many at a time."""
    from triton import AsyncCompileMode  # only where Triton is installed

    from lamina.kernels.launch import build_only

    with Builders() as pool, AsyncCompileMode(pool), build_only():
        for program in programs:
            program()


class Builders(ThreadPoolExecutor):
    """Threads that build kernels. Where there is a GPU they load them too, and compile what hands them their arguments:
    both would otherwise be done at the first launch, one kernel after the other.

    A kernel is loaded on the device that is current where it is submitted: `launch` makes that the tensors' own."""

    def __init__(self) -> None:
        super().__init__(os.cpu_count() or 1)

    def submit(self, build: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        return super().submit(self._ready, device, build, *args, **kwargs)

    def _ready(self, device: int | None, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kernel = build(*args, **kwargs)
        if device is not None:
            with torch.cuda.device(device):
                _ = kernel.run  # the function that launches it, made when asked for
        return kernel
