"""What a captured decode step launches, block by block: our kernels by their names, PyTorch's operations as aten names.

Kernels are noted, not run, so this is fast at any size; a view or an empty tensor launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from lamina.cache.layers.cross import Source
from lamina.model import Model
from lamina.runtime.multi_token import CapturedPass
from lamina.runtime.pointers import CacheFormat
from lamina.runtime.step import CapturedStep
from lamina.sampling.chooser import Chooser

FREE = {"empty", "empty_strided", "new_empty", "empty_like", "_unsafe_view", "promote_types"}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            self.launched.append(f"aten.{name}")
        return func(*args, **(kwargs or {}))


@contextmanager
def noted(launched: list[str]) -> Iterator[None]:
    run = GridExecutor.__call__
    GridExecutor.__call__ = lambda self, *args, **kwargs: launched.append(self.fn.__name__)
    try:
        yield
    finally:
        GridExecutor.__call__ = run


def pass_launches(model: Model, rows: int, tokens: int) -> tuple[list[str], list[str]]:
    """What a captured pass launches to read, and to take tokens in."""
    cache, one = model.new_cache(rows=rows, capacity=32), CapturedPass(model, rows, tokens)
    recorders = Recorder(), Recorder()
    with noted([]):
        one.read(cache, torch.zeros(rows, tokens, dtype=torch.int64))  # makes what is made once
    for recorder, program in zip(recorders, (one.read_program, one.commit_program), strict=True):
        with noted(recorder.launched), recorder:
            program()
    return recorders[0].launched, recorders[1].launched


def launches(
    model: Model, rows: int = 1, codec: str | None = None, source: Source | None = None, slack: int = 0
) -> tuple[list[str], list[list[str]], list[str]]:
    """What a step launches before its first block, in each block, and after the last."""
    cache = model.new_cache(rows=rows, capacity=32, slack=slack, codec=codec, source=source)
    step = CapturedStep(model, rows, Chooser(), CacheFormat.of(cache))
    step.begin(cache, torch.zeros(rows, dtype=torch.int64), [4] * rows, ())
    recorder = Recorder()
    marks: list[int] = []
    handles = [
        block.register_forward_pre_hook(lambda *_: marks.append(len(recorder.launched))) for block in model.blocks
    ]
    last = model.blocks[-1].register_forward_hook(lambda *_: marks.append(len(recorder.launched)))
    try:
        with noted([]):
            step.run(1)  # makes what is made once
        marks.clear()
        with noted(recorder.launched), recorder:
            step.run(1)
    finally:
        for handle in [*handles, last]:
            handle.remove()
    cuts = [recorder.launched[a:b] for a, b in zip([0, *marks], [*marks, None], strict=True)]
    return cuts[0], cuts[1:-1], cuts[-1]
