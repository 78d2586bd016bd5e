"""`model.compile()`: compiles blocks with torch.compile, one program per kind of block and number of tokens.

One block is compiled at a time, with its weights and its stores as inputs, so all blocks of a kind share a program and
compiling takes seconds, not minutes. The host passes stores cut to the slots in use: the program then reads only stored
tokens, needs no mask, and serves any length, before and after a store grows.

Decode passes are compiled: few tokens, all rows of a cache. Everything else, such as a prompt, runs uncompiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lamina.attention.view import View
from lamina.cache.layers.base import Key, Layer
from lamina.cache.memory import Memory
from lamina.cache.step import Step

X = TypeVar("X")
MOST_TOKENS = 8  # per row in a compiled pass


class BlockStep(Step):
    """A pass as one compiled block sees it: its layer has index 0, and it shares no views or keys with other layers."""

    def __init__(self, step: Step) -> None:
        self.__dict__.update(step.__dict__)
        self.cut = step.start is not None

    def once(self, kind: Hashable, make: Callable[[], X]) -> X:
        return make()

    def share(self, key: Key, k: Tensor, v: Tensor, view: View) -> None:
        return

    def share_selection(self, key: Key, chosen: Tensor | None) -> None:
        return


class CompiledBlocks:
    """Runs the blocks of a model, compiled. `options` are those of `torch.compile`."""

    def __init__(self, blocks: Iterable[nn.Module], **options: Any) -> None:
        self.blocks = [(block, kind_of(block)) for block in blocks]
        self.options = options
        self.programs: dict[Hashable, dict[Hashable, Callable[..., Tensor]]] = {}

    def __call__(self, x: Tensor, step: Step, shared: Any) -> Tensor:
        """Runs x [R, T, width] through `block(x, step.memory(i), shared)`, block after block."""
        assert step.cache is not None
        for_all, end = BlockStep(step), step.bound
        key = (*x.shape[:2], for_all.cut)
        first, programs = key not in self.programs, self.programs.setdefault(key, {})
        sources = {i for i, _ in step.cache.shared}
        for i, (block, kind) in enumerate(self.blocks):
            if i in sources or any(layer.spec.reads_from for layer in step.layers[i].values()):
                x = block(x, step.memory(i), shared)  # uncompiled: what is shared is passed from block to block
                continue
            layers = {name: cut_line(layer, end) for name, layer in step.layers[i].items()}
            if first:
                mark_slots_dynamic(layers.values())
            if kind not in programs:
                programs[kind] = _program(**self.options)
            for_all._pending = {}
            x = programs[kind](block, x, Memory(for_all, 0, layers), shared)
            for (_, name), left in for_all._pending.items():
                step.leave((i, name), left)
        return x


def kind_of(block: nn.Module) -> Hashable:
    """A key that is equal for blocks that differ only in their weights; torch.compile adds guards for the rest."""
    specs: Any = block.specs
    return type(block), tuple(specs.items()), tuple(parameter.shape for parameter in block.parameters())


def why_not_compiled(step: Step, x: Tensor) -> str | None:
    """Why this pass runs uncompiled; None if it is compiled."""
    if step.cache is None:
        return "there is no cache"
    if step.staged is not None:
        return "its cache is stored on the host, and layers are fetched one by one"
    if step.T > MOST_TOKENS:
        return f"{step.T} tokens per row; passes of up to {MOST_TOKENS} are compiled"
    if step.cache.pages is not None:
        return "the cache is stored in pages of a pool"
    if step.rows is not None or step.counts is not None or step.spans is not None:
        return "the pass is over some rows only, has padding, or has tokens that see each other both ways"
    if step.attended is not None:
        return "attention weights are recorded"
    if torch.is_grad_enabled() and x.requires_grad:
        return "gradients are required"
    room = [layer.slots or 0 for entry in step.layers for layer in entry.values() if is_line(layer)]
    assert step.bound is not None
    if room and (step.start == 0 or min(room) <= step.bound):
        return "a store is empty or full, which would compile another program"
    return None


def is_line(layer: Layer) -> bool:
    return layer.layout is not None and layer.layout.ring is None


def cut_line(layer: Layer, end: int | None) -> Layer:
    """A view of a line with only its first `end` slots; any other layer unchanged."""
    if not is_line(layer):
        return layer
    return layer._with({name: tensor[..., :end, :] for name, tensor in layer.data.items()})


def mark_slots_dynamic(layers: Iterable[Layer]) -> None:
    """Tells torch.compile, before the first compilation, that the number of slots varies."""
    for layer in layers:
        for tensor in layer.data.values() if layer.layout is not None else ():
            torch._dynamo.maybe_mark_dynamic(tensor, tensor.dim() - 2)


def _run(block: nn.Module, x: Tensor, memory: Memory, shared: Any) -> Tensor:
    # Reshaped to 2-D and back: an axis of length 1 may have any stride, and another stride would compile again.
    return block(x, memory, shared).reshape(-1, x.shape[-1]).view(x.shape)


def _program(**options: Any) -> Callable[..., Tensor]:
    """Compiles a copy of `_run` with its own code object and name: torch.compile limits the number of compiled variants
    per code object, and treats a size that once varied under a name as dynamic from then on."""
    name = f"block_{next(_serial)}"
    own = FunctionType(_run.__code__.replace(co_name=name), globals(), name)
    return torch.compile(own, fullgraph=True, **options)


_serial = itertools.count()
