"""Builds the kernels of a decode step, then those of captured prompts, before they are needed: in threads, while the
weights are being loaded.

The program of a captured step is run once over a model on the meta device, whose tensors have no values. Every launch
in this run only requests its kernel. Building a kernel is mostly waiting for a compiler, so many are built at a time.

Only the capture of the first step waits for the kernels: plain passes read the prompt, so the first token does not
wait. Arithmetic on the meta device would load PyTorch's compiler, which takes as long as building all kernels, so the
model is made without any.
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
from lamina.runtime.builders import build_together, builds, prompt_builds
from lamina.runtime.eligibility import why_no_kernels
from lamina.runtime.multi_token import CapturedPass
from lamina.runtime.pointers import CacheFormat
from lamina.runtime.prompts.prebuild import build_prompt_kernels
from lamina.runtime.step import CapturedStep
from lamina.sampling.chooser import Chooser

if TYPE_CHECKING:
    from lamina.model import Model

_running: WeakSet[KernelBuild] = WeakSet()


class KernelBuild:
    """Two threads that build kernels for one row in the background: those of decoding, then those of prompts."""

    def __init__(self, make: Callable[[], Model], device: torch.device) -> None:
        self.failed: Exception | None = None
        self.made: Model | None = None  # on the meta device
        self.thread = Thread(target=self._build, args=(make, device), daemon=True)
        self.prompt_thread = Thread(target=self._build_prompts, args=(device,), daemon=True)
        _running.add(self)
        self.thread.start()
        self.prompt_thread.start()

    def register(self, model: Model) -> None:
        """Registers the model that will use the kernels: `wait_for_kernels(model)` then waits for this build."""
        builds[model], prompt_builds[model] = self.thread, self.prompt_thread

    def _build(self, make: Callable[[], Model], device: torch.device) -> None:
        try:
            with torch.cuda.device(device):
                model = make()
                build_kernels(model)
                self.made = model
        except Exception as problem:  # not raised here: launching the kernel raises it again, with a better traceback
            self.failed = problem

    def _build_prompts(self, device: torch.device) -> None:
        self.thread.join()
        model, self.made = self.made, None
        try:
            if model is not None:
                with torch.cuda.device(device):
                    build_prompt_kernels(model)
        except Exception as problem:
            self.failed = problem


@atexit.register
def _end_all() -> None:
    """Waits for running builds when the interpreter exits: a thread that is stopped inside PyTorch aborts the process.
    The wait is short, since the thread pools accept no more work by then."""
    for one in list(_running):
        one.thread.join()
        one.prompt_thread.join()


def start_build(make: Callable[[], Model], dtype: torch.dtype, device: torch.device) -> KernelBuild | None:
    """Starts building the kernels for a model that is about to be loaded; None if it would use none.

    make   builds the same model on the meta device, in the thread that builds the kernels
    """
    if device.type != "cuda":
        return None
    x = torch.empty(0, dtype=dtype, device=device)
    if kernels.why_not(x) is not None:
        return None
    return KernelBuild(make, x.device)  # with its index: each thread has its own current device


@torch.no_grad()
def build_kernels(
    model: Model, rows: int = 1, tokens: int | None = None, codec: Codecs | None = None, page: int = 0, slack: int = 0
) -> None:
    """Builds the kernels of a greedy decode step, or of a pass of `tokens` tokens per row, for a model on the meta
    device and caches with this codec, `page` slots per page (0: not in a pool) and this slack."""
    if why_no_kernels(model.specs, dtype=model.dtype) is not None:
        return
    cache_format = replace(CacheFormat.of(model.new_cache(rows, slack=slack, codec=codec)), page=page)
    if tokens is None:
        build_together(CapturedStep(model, rows, Chooser(), cache_format).program)
    else:
        one = CapturedPass(model, rows, tokens, cache_format)
        build_together(one.read_program, one.commit_program)
