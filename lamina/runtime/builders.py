"""Threads that build Triton kernels, many at a time: building one is mostly waiting for a compiler."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from lamina.model import Model

builds: WeakKeyDictionary[Model, Thread] = WeakKeyDictionary()
"""Model -> the thread that builds its kernels (prebuild.py)."""
prompt_builds: WeakKeyDictionary[Model, Thread] = WeakKeyDictionary()
"""Model -> the thread that builds its kernels of captured prompts."""


def wait_for_kernels(model: Model, prompts: bool = False) -> None:
    """Waits until the kernels that are being built for this model, if any, are ready; with `prompts`, those of captured
    prompts too."""
    for running in (builds, prompt_builds) if prompts else (builds,):
        if (thread := running.get(model)) is not None:
            thread.join()
            running.pop(model, None)


def build_together(*programs: Callable[[], object]) -> None:
    """Builds every kernel that these programs launch, many at a time. Launches inside only request their kernel."""
    from triton import AsyncCompileMode  # Triton may not be installed

    from lamina.kernels.launch import build_only

    with _uncollected, Builders() as pool, AsyncCompileMode(pool), build_only():
        for program in programs:
            program()


class _Uncollected:
    """Pauses Python's garbage collector inside, for any number of threads at once.

    Triton parses kernels in all threads. A collection inside `ast.parse` may let another thread parse in the middle of
    it, and CPython 3.11 then fails: "AST constructor recursion depth mismatch".
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.enabled = Lock(), 0, False

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.enabled = gc.isenabled()
                gc.disable()
            self.inside += 1

    def __exit__(self, *problem: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0 and self.enabled:
                gc.enable()


_uncollected = _Uncollected()


class Builders(ThreadPoolExecutor):
    """Threads that build kernels. With a GPU they also load each kernel and compile its launcher; otherwise the first
    launch would do both, one kernel after the other.

    A kernel is loaded on the device that is current when it is submitted: `launch` makes the tensors' device current.
    """

    def __init__(self) -> None:
        super().__init__(os.cpu_count() or 1)

    def submit(self, build: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        return super().submit(self._ready, device, build, *args, **kwargs)

    def _ready(self, device: int | None, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kernel = build(*args, **kwargs)
        if device is not None:
            with torch.cuda.device(device):
                _ = kernel.run  # a lazy property: loads the kernel and compiles its launcher
        return kernel
