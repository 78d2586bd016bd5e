"""Kernels of a decode step, built before they are needed: in threads, while weights are on their way.

The program of a captured step is run once over a model without numbers (on the meta device). Every launch in it then
asks for its kernel to be built and does nothing else. Building a kernel is mostly waiting for a compiler, so many are
built at a time.

Nobody waits for it before a step is captured: a prompt is read by plain passes, and its first token is there sooner.
Arithmetic on the meta device would load PyTorch's compiler, which takes as long as building all kernels: a model is
made without any.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from lamina import kernels
from lamina.cache.codec.codec import Codecs
from lamina.runtime.builders import build_together, builds
from lamina.runtime.eligibility import why_no_kernels
from lamina.runtime.multi_token import CapturedPass
from lamina.runtime.pointers import CacheFormat
from lamina.runtime.step import CapturedStep
from lamina.sampling.chooser import Chooser

if TYPE_CHECKING:
    from lamina.model import Model

_running: WeakSet[KernelBuild] = WeakSet()


class KernelBuild:
    """The kernels of one-row decoding being built in the background."""

    def __init__(self, make: Callable[[], Model], device: torch.device) -> None:
        self.failed: Exception | None = None
        self.thread = Thread(target=self._build, args=(make, device), daemon=True)
        _running.add(self)
        self.thread.start()

    def register(self, model: Model) -> None:
        """This model will use them: `wait_for_kernels` waits until they are there."""
        builds[model] = self.thread

    def _build(self, make: Callable[[], Model], device: torch.device) -> None:
        try:
            with torch.cuda.device(device):
                build_kernels(make())
        except Exception as problem:  # whoever launches the kernel meets it again, with its own trace
            self.failed = problem


@atexit.register
def _end_all() -> None:
    """Waits for rehearsals when the interpreter exits: a thread that is stopped inside PyTorch aborts the process. The
    wait is short, since the executors of their builders take no more work by then."""
    for one in list(_running):
        one.thread.join()


def start_build(make: Callable[[], Model], dtype: torch.dtype, device: torch.device) -> KernelBuild | None:
    """Starts building the kernels for a model that is about to be loaded; None where it would use none.

    make   builds the same model on the meta device, in the thread that builds the kernels
    """
    if device.type != "cuda":
        return None
    x = torch.empty(0, dtype=dtype, device=device)
    if kernels.why_not(x) is not None:
        return None
    return KernelBuild(make, x.device)  # with its number: a thread has a current device of its own


@torch.no_grad()
def build_kernels(
    model: Model, rows: int = 1, tokens: int | None = None, codec: Codecs | None = None, page: int = 0
) -> None:
    """Builds the kernels of a greedy decode step, or of a pass of so many tokens, of a model on the meta device, for
    caches of this codec, or in pages of so many slots."""
    if why_no_kernels(model.specs, dtype=model.dtype) is not None:
        return
    cache_format = replace(CacheFormat.of(model.new_cache(rows, codec=codec)), page=page)
    if tokens is None:
        build_together(CapturedStep(model, rows, Chooser(), cache_format).program)
    else:
        one = CapturedPass(model, rows, tokens, cache_format)
        build_together(one.read_program, one.commit_program)
