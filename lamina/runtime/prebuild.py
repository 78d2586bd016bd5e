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
import gc
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from lamina import kernels
from lamina.cache.codec.codec import Codecs
from lamina.runtime.eligibility import why_no_kernels

if TYPE_CHECKING:
    from lamina.model import Model

_under_way: WeakKeyDictionary[Model, Rehearsal] = WeakKeyDictionary()
_rehearsals: WeakSet[Rehearsal] = WeakSet()


class Rehearsal:
    """The kernels of one-row decoding being built in the background."""

    def __init__(self, make: Callable[[], Model], device: torch.device) -> None:
        self.failed: Exception | None = None
        self.thread = Thread(target=self._build, args=(make, device), daemon=True)
        _rehearsals.add(self)
        self.thread.start()

    def serves(self, model: Model) -> None:
        """This model will use them: `wait_for_kernels` waits until they are there."""
        _under_way[model] = self

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
    for one in list(_rehearsals):
        one.thread.join()


def rehearsal(make: Callable[[], Model], dtype: torch.dtype, device: torch.device) -> Rehearsal | None:
    """Starts building the kernels for a model that is about to be loaded; None where it would use none.

    make   builds the same model on the meta device, in the thread that builds the kernels
    """
    if device.type != "cuda":
        return None
    x = torch.empty(0, dtype=dtype, device=device)
    if kernels.why_not(x) is not None:
        return None
    return Rehearsal(make, x.device)  # with its number: a thread has a current device of its own


def wait_for_kernels(model: Model) -> None:
    """Until the kernels that are being built for this model are there, if any are."""
    if (under_way := _under_way.get(model)) is not None:
        under_way.thread.join()
        _under_way.pop(model, None)


@torch.no_grad()
def build_kernels(
    model: Model, rows: int = 1, tokens: int | None = None, codec: Codecs | None = None, page: int = 0
) -> None:
    """Builds the kernels of a greedy decode step, or of a pass of so many tokens, of a model on the meta device, for
    caches of this codec, or in pages of so many slots."""
    from lamina.runtime.multi_token import CapturedPass
    from lamina.runtime.pointers import Written
    from lamina.runtime.step import CapturedStep
    from lamina.sampling.chooser import Chooser

    if why_no_kernels(model.specs, dtype=model.dtype) is not None:
        return
    written = replace(Written.like(model.new_cache(rows, codec=codec)), page=page)
    if tokens is None:
        build_together(CapturedStep(model, rows, Chooser(), written).program)
    else:
        one = CapturedPass(model, rows, tokens, written)
        build_together(one.reading, one.taking_in)


def build_together(*programs: Callable[[], object]) -> None:
    """Builds every kernel that these programs launch, many at a time."""
    from triton import AsyncCompileMode

    from lamina.kernels.launch import building

    with _uncollected, Builders() as pool, AsyncCompileMode(pool), building():
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
